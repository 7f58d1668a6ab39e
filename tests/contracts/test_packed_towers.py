"""Towers that take images of any size, patch after patch: Qwen-VL's."""

import json

import pytest
import torch
import transformers as t
from torch import Tensor

import rankfold
from families import some_ids
from rankfold import CalibrationData
from rankfold.calibration.runner import advance, measure, start
from rankfold.compression.replace import replace
from rankfold.data.batches import Example
from rankfold.errors import DataError
from rankfold.methods.base import BlockResult
from rankfold.methods.result import put_attention
from rankfold.models.dense_model import DenseModel
from tiny_encoders import ENCODERS, opened_encoder, packed, samples_of, states, tiny_encoder
from tiny_pairs import picture, write_pairs
from versions import needs_merged_tables

TOWERS = [family for family in ENCODERS if family.startswith("qwen")]
SIZES = ((4, 6), (6, 6), (2, 8), (6, 6))  # two alike, and 2 x 8 is two windows of Qwen2.5-VL


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("block", [0, 1])
def test_attention_replaced_at_full_rank_sees_as_far_as_the_dense_one(family, block):
    """Of several images at once, in windows and without."""
    source, images = opened_encoder(family), (packed(0, *SIZES),)
    stream, reference = (start(source, images, autocast=None) for _ in range(2))
    for index in range(block):
        advance(source.block(index), stream)
        advance(source.block(index), reference)
    view, result = source.block(block), BlockResult()
    full = view.attention.head_dim
    projections = dict(zip("qkvo", (*view.attention.qkv(), view.attention.output), strict=True))
    put_attention(result, view.attention, projections, full, full)
    advance(source.block(block), reference)
    advance(replace(view, result, source), stream)
    torch.testing.assert_close(stream.hidden[0], reference.hidden[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def rotated(source: DenseModel, image: Example) -> tuple[Tensor, Tensor, list[int]]:
    """Queries and keys ``(T, H, N)`` of block 0 by transformers' own function, and lengths of what sees each other."""
    module = type(source.model).__module__
    turn = __import__(module, fromlist=["x"]).apply_rotary_pos_emb_vision
    found, tower = {}, source.model.model.visual
    attention = tower.blocks[0].attn
    handle = attention.register_forward_hook(
        lambda _, args, kwargs, __: found.update(kwargs, x=args[0]), with_kwargs=True
    )
    tower(**image.read())
    handle.remove()
    query, key, _ = attention.qkv(found["x"]).view(len(found["x"]), 3, attention.num_heads, -1).unbind(1)
    return *turn(query, key, *found["position_embeddings"]), found["cu_seqlens"].diff().tolist()


@pytest.mark.parametrize("family", TOWERS)
def test_moments_are_of_what_sees_each_other(family):
    source, image = opened_encoder(family), packed(0, *SIZES)
    found = measure(
        source.block(0), start(source, (image,), autocast=None), {"query_key", "key_spread", "value"}, step=False
    )
    query, key, lengths = rotated(source, image)
    expected, spread = 0.0, []
    for q, k in zip(query.split(lengths), key.split(lengths), strict=True):
        k = k - k.mean(0)
        expected = expected + torch.einsum("ahi,ahj,bhi,bhj->hij", q, q, k, k)
        spread.append(k)
    torch.testing.assert_close(found["query_key"].second.float(), expected, rtol=1e-3, atol=1e-3)
    spread = torch.cat(spread)
    torch.testing.assert_close(
        found["key_spread"].second.float(), torch.einsum("ahi,ahj->hij", spread, spread), rtol=1e-3, atol=1e-3
    )
    assert found["query_key"].count == sum(length**2 for length in lengths)
    assert (max(lengths) == 16) == (family == "qwen2.5-vl") and found["value"].count == sum(lengths)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder with the tower compressed, and with the language model too."""
    needs_merged_tables()
    folder = tmp_path_factory.mktemp("both")
    tiny_encoder("qwen2.5-vl").save_pretrained(folder / "dense")
    parts = [rankfold.open_model(folder / "dense", device="cpu", component=part) for part in ("vision", "language")]
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    text = rankfold.CalibrationData(some_ids(24, 24), "x", "x", 0, some_ids(4, 24, 1))
    rankfold.compress_components([(parts[0], method, samples_of(parts[0])), (parts[1], method, text)], folder / "small")
    return folder


@pytest.mark.parametrize("grids", [[], [[1, 4, 4]], [[1, 2, 4], [1, 6, 8]]])
def test_the_whole_model_sees_no_image_one_and_several(both, grids):
    model = t.AutoModelForImageTextToText.from_pretrained(both / "small").eval()
    kinds = {type(m).__name__ for name, m in model.named_modules() if name.endswith("attn")}
    assert kinds == {"PackedAttention", "CompressedAttention"}
    ids = [3, *[i for _, h, w in grids for i in (91, *[90] * (h * w // 4), 92)], 5, 6]
    ids = torch.tensor([ids])
    seen = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if grids:
        patches = sum(h * w for _, h, w in grids)
        seen |= {"pixel_values": torch.randn(patches, 3 * 2 * 49), "image_grid_thw": torch.tensor(grids)}
        seen["mm_token_type_ids"] = (ids == 90).long()
    with torch.no_grad():
        logits = model(**seen).logits
        assert torch.isfinite(logits).all()
        if grids:
            other = model(**seen | {"pixel_values": -seen["pixel_values"]}).logits
            assert not torch.allclose(logits[:, -1], other[:, -1])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (model.generate(**seen, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain) and cached.shape[1] == ids.shape[1] + 4


@pytest.fixture(scope="module")
def processor():
    return t.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=28 * 28, max_pixels=70 * 70)


def test_images_of_different_sizes_are_read_as_the_processor_cuts_them(processor, tmp_path):
    source = opened_encoder("qwen2-vl")
    file = write_pairs(tmp_path, 12)
    found = rankfold.load_calibration(file, source, num_samples=8, tokenizer=processor)
    described = found.describe()
    assert len(found.ids) == 8 and len(found.held_out) == 1 and len({image.tokens for image in found.ids}) > 1
    assert described["kind"] == "images" and described["tokens"] == sum(image.tokens for image in found.ids)
    assert described["max_length"] == max(image.tokens for image in found.ids)
    one = processor(images=[picture(0)], return_tensors="pt")
    given = [image.read() for image in (*found.ids, *found.held_out)]
    assert all(int(image["grid_thw"].prod()) == len(image["hidden_states"]) for image in given)
    everything = rankfold.load_calibration(file, source, num_samples=64, tokenizer=processor)
    pixels = [image.read()["hidden_states"] for image in (*everything.ids, *everything.held_out)]
    assert sum(p.shape == one["pixel_values"].shape and torch.equal(p, one["pixel_values"]) for p in pixels) == 1
    for name in (tmp_path / "images").iterdir():
        picture(99).save(name)
    with pytest.raises(DataError, match="an image changed while it was in use; start again"):
        [image.read() for image in found.ids]


def test_what_a_tower_does_not_take_is_said():
    small = CalibrationData(torch.zeros(2, 3, 28, 28), "x", "x", 0)
    with pytest.raises(DataError, match=r"takes images of any size, an example each, got \[3, 28, 28\]; calibrate on"):
        rankfold.calibrate(opened_encoder("qwen2-vl"), small)
    many = samples_of(opened_encoder("qwen2-vl"))
    with pytest.raises(DataError, match="takes no images of any size by themselves; calibrate on images of one size"):
        rankfold.calibrate(opened_encoder("vit-head"), many)
    with pytest.raises(DataError, match="takes no images of any size by themselves; calibrate on text or image-text"):
        rankfold.calibrate(rankfold.open_model(tiny_encoder("qwen2-vl"), device="cpu"), many)
    pairs = Example.of({"input_ids": torch.tensor([[1, 2, 3]])})
    with pytest.raises(DataError, match="the vision component of .* takes no image-text examples; calibrate on images"):
        rankfold.calibrate(opened_encoder("qwen2-vl"), rankfold.CalibrationData((pairs,), "x", "x", 0))


def test_moments_are_kept_and_used_again(tmp_path):
    source = opened_encoder("qwen2-vl")
    images, method = samples_of(source), rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    moments = rankfold.calibrate(source, images, tmp_path / "moments")
    kept = rankfold.compress(opened_encoder("qwen2-vl"), method=method, moments=moments, mode="one-pass").model
    fresh = rankfold.compress(opened_encoder("qwen2-vl"), method=method, calibration=images, mode="one-pass").model
    torch.testing.assert_close(states(kept, "qwen2-vl", images.held_out), states(fresh, "qwen2-vl", images.held_out))


@pytest.mark.parametrize("part", ["language", "vision"])
def test_rotary_frequencies_are_those_of_the_part(part):
    source = rankfold.open_model(tiny_encoder("qwen2-vl"), device="cpu", component=part)
    model = source.model.model
    owner = model.visual.rotary_pos_emb if part == "vision" else model.language_model.rotary_emb
    assert source.inv_freq(0) is owner.inv_freq


@torch.no_grad()
def merged(model, image: Example) -> Tensor:
    """``(n, D)`` what the language model gets of these images, in the tower's own order."""
    seen = []
    handle = model.model.visual.merger.register_forward_hook(lambda _, __, out: seen.append(out))
    model.model.visual(**image.read())
    handle.remove()
    return seen[0].double()


@pytest.mark.parametrize(
    "method", [rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2), rankfold.LatentLLM(sparsity=0.2, rank_multiple=2)]
)
@pytest.mark.parametrize("family", TOWERS)
def test_what_merges_patches_is_a_projector(family, method, tmp_path):
    tiny_encoder(family).save_pretrained(tmp_path / "dense")
    source = rankfold.open_model(tmp_path / "dense", device="cpu", component="projector")
    source.autocast = None
    assert source.architecture.blocks == "model.visual.merger" and len(source) == 1
    images = samples_of(source)
    folder = rankfold.compress(source, method=method, calibration=images, output=tmp_path / "small").output
    dense, small = (rankfold.load(f, device="cpu") for f in (tmp_path / "dense", folder))
    for name, tensor in small.state_dict().items():
        if not name.startswith("model.visual.merger."):
            assert torch.equal(tensor, dense.state_dict()[name])
    assert small.num_parameters() < dense.num_parameters()
    wanted, found, fitted = (
        torch.cat([merged(model, image) for image in some])
        for model, some in ((dense, images.held_out), (small, images.held_out), (dense, images.ids))
    )
    reports = json.loads((folder / "rankfold.json").read_text())["blocks"]["0"]
    if "mlp" in reports:  # of the units that went
        error = ((wanted - found).norm() / (wanted - fitted.mean(0)).norm()).item()
        assert reports["mlp"]["held_out_error"] == pytest.approx(error, rel=1e-3)
    assert 0 < ((wanted - found).norm() / wanted.norm()).item() < 1


def test_a_padded_batch_with_images_writes_what_each_writes_alone(both):
    model = t.AutoModelForImageTextToText.from_pretrained(both / "small").eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def given(grid: list[int], text: list[int]) -> dict[str, Tensor]:
        patches, ids = grid[1] * grid[2], [3, 91, *[90] * (grid[1] * grid[2] // 4), 92, *text]
        pixels = torch.randn(patches, 3 * 2 * 49, generator=torch.Generator().manual_seed(patches))
        seen = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        return seen | {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}

    def written(seen: dict[str, Tensor]) -> Tensor:
        return model.generate(**seen, mm_token_type_ids=(seen["input_ids"] == 90).long(), **options)[:, -5:]

    apart = [given([1, 4, 4], [5, 6, 7, 8]), given([1, 2, 4], [9])]
    width = max(one["input_ids"].shape[1] for one in apart)
    together = {name: torch.cat([one[name] for one in apart]) for name in ("pixel_values", "image_grid_thw")}
    for name in ("input_ids", "attention_mask"):
        rows = [torch.nn.functional.pad(one[name], (width - one[name].shape[1], 0)) for one in apart]
        together[name] = torch.cat(rows)
    assert torch.equal(written(together), torch.cat([written(one) for one in apart]))
