"""The projector between a tower and a language model: an MLP by itself, with a stream of another width after it."""

import json

import pytest
import torch
import transformers as t

import rankfold
from rankfold import LatentLLM, MoDeGPT, Rankfold
from rankfold.errors import OptionError, UnsupportedModelError
from tiny_encoders import opened_encoder
from tiny_pairs import FAMILIES, tiny_model

PIXELS = torch.randn(40, 3, 28, 28, generator=torch.Generator().manual_seed(1))
PLACE = "model.multi_modal_projector"


def images() -> rankfold.CalibrationData:
    return rankfold.CalibrationData(PIXELS[:32], "x", "x", 0, PIXELS[32:], patches=4)


def opened(model="llava"):
    source = rankfold.open_model(
        tiny_model(model) if isinstance(model, str) else model, device="cpu", component="projector"
    )
    source.autocast = None
    return source


@torch.no_grad()
def sent(model, pixels) -> torch.Tensor:
    """``(n, D)`` what the projector sends for these images."""
    seen = []
    hook = model.get_submodule(PLACE).register_forward_hook(lambda _, __, out: seen.append(out.flatten(0, -2)))
    model.model.get_image_features(pixel_values=pixels)
    hook.remove()
    return seen[0].double()


@pytest.mark.parametrize("method", [MoDeGPT(sparsity=0.4, rank_multiple=2), Rankfold(sparsity=0.4, rank_multiple=2)])
def test_units_go_and_the_error_is_the_one_that_is_said(method, tmp_path):
    tiny_model("llava").save_pretrained(tmp_path / "dense")
    source = rankfold.open_model(tmp_path / "dense", device="cpu", component="projector")
    source.autocast = None
    assert source.streamed and len(source) == 1 and source.architecture.blocks == PLACE
    folder = rankfold.compress(source, method=method, calibration=images(), output=tmp_path / "small").output
    dense, small = (t.AutoModelForImageTextToText.from_pretrained(f).eval() for f in (tmp_path / "dense", folder))
    state, same = small.state_dict(), 0
    for name, tensor in dense.state_dict().items():
        if not name.startswith(PLACE):
            assert torch.equal(state[name], tensor)
            same += 1
    assert same
    rows = (state[f"{PLACE}.linear_1.weight"][:, None] == dense.state_dict()[f"{PLACE}.linear_1.weight"]).all(-1)
    assert rows.any(1).all() and state[f"{PLACE}.linear_2.weight"].shape[1] == len(rows) < rows.shape[1]
    record = json.loads((folder / "rankfold.json").read_text())
    report = record["blocks"]["0"]["mlp"]
    for pixels, key in ((PIXELS[:32], "relative_error"), (PIXELS[32:], "held_out_error")):
        wanted, found = sent(dense, pixels), sent(small, pixels)
        gap, about = wanted - found, sent(dense, PIXELS[:32]).mean(0)  # the bias takes the mean of what was fitted
        assert (gap.square().sum() / (wanted - about).square().sum()).sqrt().item() == pytest.approx(
            report[key], rel=1e-3
        )
    assert record["plan"]["part"] == "projector" and record["held_out"]["state_error"] > 0


def test_in_memory_it_is_the_same_and_nothing_changes_without_sparsity():
    dense = tiny_model("llava")
    whole = rankfold.compress(opened(), method=MoDeGPT(sparsity=0.0), calibration=images()).model
    assert torch.equal(sent(whole, PIXELS), sent(dense, PIXELS))
    small = rankfold.compress(opened(), method=Rankfold(sparsity=0.4, rank_multiple=2), calibration=images()).model
    again = rankfold.compress(opened(), method=Rankfold(sparsity=0.4, rank_multiple=2), calibration=images()).model
    assert torch.equal(sent(small, PIXELS), sent(again, PIXELS))


def test_latent_layers_take_it_too():
    errors = []
    for sparsity in (0.1, 0.5):
        small = rankfold.compress(
            opened(), method=LatentLLM(sparsity=sparsity, rank_multiple=1), calibration=images()
        ).model
        errors.append((sent(small, PIXELS) - sent(tiny_model("llava"), PIXELS)).norm().item())
        assert type(small.get_submodule(PLACE).linear_1).__name__ == "LatentLinear"
    assert 0 < errors[0] < errors[1]


def test_it_never_goes_as_a_whole():
    source = opened()
    (unit,) = Rankfold(sparsity=0.3, rank_multiple=2, allow_module_removal=True).prunable_modules(source.block(0))
    assert unit.module == "mlp" and min(unit.ranks) > 0


@pytest.mark.parametrize("family", ["llava_next"])
def test_images_that_a_family_cuts_up_are_given_whole(family):
    source = opened(tiny_model(family))
    small = rankfold.compress(
        source, method=MoDeGPT(sparsity=0.4, rank_multiple=2), calibration=images_for(source)
    ).model
    assert (
        small.get_submodule(PLACE).linear_1.out_features < tiny_model(family).get_submodule(PLACE).linear_1.out_features
    )


def images_for(source) -> rankfold.CalibrationData:
    pixels = source.part.example(24, 1)
    return rankfold.CalibrationData(pixels[:16], "x", "x", 0, pixels[16:], patches=source.part.length_of(pixels))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_where_it_is_no_mlp_one_line_says_which_parts_there_are(family):
    if family.startswith(("llava", "qwen")):
        pytest.skip("it is one")
    with pytest.raises(OptionError, match=r"has the components? .*, got projector; [^\n]*$"):
        opened(tiny_model(family))


@pytest.mark.parametrize("method", ["slicegpt", "kobd", "shortgpt"])
def test_what_cannot_take_it_says_so(method):
    with pytest.raises((OptionError, UnsupportedModelError), match=r"^[^\n]*$"):
        rankfold.compress(opened(), method=rankfold.make_method(method, sparsity=0.3), calibration=images())


def test_an_encoder_has_none():
    with pytest.raises(OptionError, match="got projector"):
        opened(opened_encoder("vit-head").model)
