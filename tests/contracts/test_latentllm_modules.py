"""The modules of the runtime that the options of the latent methods bring, and all that is refused."""

import pytest
import torch
from test_latentllm_options import compressed
from transformers import DynamicCache

from families import some_ids
from rankfold import LatentLLM
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.linalg.quantization import dequantize, quantize
from rankfold.modules import CompressedAttention, QuantizedTensor, SparseCorrection, SparseLinear, build


@pytest.mark.parametrize("family", ["opt", "llama", "bloom"])
def test_padding_on_the_left_changes_nothing_with_a_shared_latent(family):
    model, _ = compressed(family, shared_qkv=True, sparsity=0.5)
    ids = some_ids(1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(alone[:, 12:], model.generate(padded, attention_mask=mask, **settings)[:, 17:])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 8), (129,)])
def test_packed_codes_come_back(bits, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = quantize(x, bits=bits, chunk=8)
    module = QuantizedTensor(shape, bits, 8)
    module.load_state_dict({"codes": QuantizedTensor.pack(q.codes, bits), "scale": q.scale, "low": q.low})
    assert torch.equal(module.unpack(), q.codes)
    assert torch.equal(module.weight, dequantize(q))
    assert module.codes.numel() <= -(-x.numel() * bits // 8) + 3  # fields are padded to whole bytes, one per kind
    if x.numel() % 8 == 0:
        assert module.codes.numel() * 8 == x.numel() * bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5)])
def test_a_sparse_correction_is_the_sparse_product(dtype, lead):
    torch.manual_seed(0)
    D = torch.randn(6, 9) * (torch.rand(6, 9) < 0.3)
    D[2] = 0  # an empty row
    csr = D.to_sparse_csr()
    module = SparseCorrection(9, 6, csr.values().numel())
    module.load_state_dict({"values": csr.values(), "columns": csr.col_indices(), "starts": csr.crow_indices()})
    x = torch.randn(*lead, 9)
    loose = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(module.to(dtype)(x.to(dtype)).float(), x @ D.T, rtol=loose, atol=loose)
    assert module.columns.dtype == torch.int16
    if dtype == torch.float32:
        module(x.requires_grad_()).sum().backward()
        torch.testing.assert_close(x.grad, D.sum(0).expand_as(x))
        torch.testing.assert_close(module.values.grad, x.detach().reshape(-1, 9).sum(0)[csr.col_indices()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sparse_layer_is_the_dense_one_in_every_dtype(dtype, autocast, bias):
    torch.manual_seed(0)
    dense = torch.nn.Linear(300, 6, bias=bias)
    with torch.no_grad():
        dense.weight *= torch.rand(6, 300) < 0.5
    csr = dense.weight.detach().to_sparse_csr()
    module = build({"kind": "sparse", "in": 300, "out": 6, "nonzeros": csr.values().numel(), "bias": bias})
    assert isinstance(module, SparseLinear)
    tensors = {"values": csr.values(), "columns": csr.col_indices(), "starts": csr.crow_indices()}
    state = {f"sparse.{name}": t for name, t in tensors.items()} | ({"bias": dense.bias} if bias else {})
    module.load_state_dict(state)
    module.sparse.check_indices("sparse")
    x, expected = torch.randn(2, 5, 300), None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = (layer.to(dtype)(x.to(dtype)) for layer in (module, dense))
    assert found.dtype == expected.dtype
    exact = x @ csr.to_dense().T + (state["bias"].detach().float() if bias else 0)
    loose = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.03}[found.dtype]
    torch.testing.assert_close(found.float(), exact, rtol=loose, atol=loose)
    assert module(torch.zeros(2, 0, 300, dtype=dtype)).shape == (2, 0, 6)  # an expert that no token goes to


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 9, "chunk": 4}, "2 to 8 bits, got 9"),
        ({"bits": 4, "chunk": 0}, "'chunk' of a latent module must be a positive integer, got 0"),
        ({"nonzeros": 1000}, r"1000 non-zeros do not fit a \(10, 12\) layer"),
        ({"head_identity": 2}, "a per-head identity needs rank >= 5"),
        ({"kind": "sparse", "nonzeros": 121}, r"121 non-zeros do not fit a \(10, 12\) layer"),
        ({"kind": "sparse", "nonzeros": 0}, "'nonzeros' of a sparse module must be a positive integer, got 0"),
        ({"kind": "split_head", "heads": 2, "form": "lu"}, "unknown form 'lu' of a split-head layer"),
        ({"kind": "split_head", "heads": 5}, r"rank 4 of heads \(2, 12\) is too large"),
    ],
)
def test_a_hostile_description_is_refused(change, message):
    spec = {"kind": "latent", "in": 12, "out": 10, "rank": 4, "form": "plain", "bias": True}
    with pytest.raises(ValueError, match=message):
        build(spec | change)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 1}, r"bits must be 0 \(not quantised\) or 2 to 8, got 1"),
        ({"bits": 9}, "2 to 8, got 9"),
        ({"bits": 4, "chunk": 0}, "chunk must be >= 1, got 0"),
        ({"bits": 4, "sparsity": 0.0}, "sparsity 0 leaves all dense"),
        ({"sparse": 1.1}, r"sparse must be in \[0, 1\], got 1.1; 0.1 gives a tenth of the kept weights"),
        ({"sparse": -0.1}, r"sparse must be in \[0, 1\], got -0.1"),
        ({"sparse": 1, "bits": 8}, "sparse=1 has none, and sparse values stay; leave out bits=8"),
        ({"sparse": 1, "shared_qkv": True}, "sparse=1 has no latent that shared_qkv=true could share; leave one out"),
        ({"sparse": 1, "junction": "lu"}, "sparse=1 has no factors for a junction; use junction=block.*got 'lu'"),
        ({"sparse": 1, "joint": "vo"}, "joint=vo fits products of two; use joint=auto or none"),
        ({"sparse": 1, "split_head": True}, "sparse > 0 and split_head=true exclude each other"),
        ({"sparse": 1, "head_junction": True}, "sparse > 0 and head_junction=true exclude each other"),
        ({"sparse": 1, "precondition": "l1"}, "use precondition=rootcov, got 'l1'"),
        ({"sparse": 1, "sparsity": 0.0}, "sparsity 0 leaves all dense"),
        ({"sparse": 0.1, "shrink": "hrd"}, "unknown shrink 'hrd'; did you mean 'hard'"),
        ({"sparse": 0.1, "precondition": "l2"}, "use precondition=rootcov, got 'l2'"),
        ({"sparse": 0.1, "joint": "qk"}, "joint=qk fits products of two; use joint=auto or none"),
        ({"sparse": 0.1, "head_junction": True}, "sparse > 0 and head_junction=true exclude each other"),
        ({"sparse": 0.1, "qk_ranks": "spectra"}, "sparse > 0 and qk_ranks=spectra exclude"),
        ({"shared_qkv": True, "joint": "vo"}, "without joint=vo; use joint=auto"),
        ({"shared_qkv": True, "split_head": True}, "shared_qkv=true and split_head=true exclude each other"),
        ({"shared_qkv": True, "modules": ("q", "o")}, "module 'q' is part of 'qkv'"),
        ({"modules": ("qkv",)}, "module 'qkv' exists with shared_qkv=true only"),
        ({"split_head": True}, "split_head=true takes the junctions block_identity_left, left, right, symmetric"),
        ({"head_junction": True, "junction": "lu"}, "head_junction=true takes the junctions block_identity_right"),
        (
            {"head_junction": True, "modules": ("k",)},
            "on q and k together, and on v and o; name both of a pair.* got k",
        ),
        ({"head_junction": True, "modules": ("q", "v")}, "on q and k together, and on v and o; name both.* got q,v"),
        ({"qk_ranks": "spectra", "modules": ("k",)}, "acts on q and k together; name both in modules, got k"),
        ({"qk_ranks": "spectra", "joint": "vo"}, "qk_ranks=spectra is for the joint query-key form"),
        ({"qk_ranks": "spectra", "junction": "left"}, "qk_ranks=spectra takes the junctions block_identity_left"),
        ({"qk_ranks": "spectrum"}, "unknown qk_ranks 'spectrum'; did you mean 'spectra'"),
    ],
)
def test_options_that_exclude_each_other(options, message):
    with pytest.raises(OptionError, match=message):
        LatentLLM(**options)


@pytest.mark.parametrize(
    "family, options, message",
    [
        (
            "llama",
            {"head_junction": True, "modules": ("q", "k")},
            "llama cannot take head_junction=true for q and k: it rot",
        ),
        ("qwen3", {"head_junction": True, "modules": ("q", "k")}, "qwen3 cannot take.* for q and k: it normalises"),
        ("qwen3", {"joint": "qk", "qk_ranks": "spectra"}, "qwen3 cannot take the joint form 'qk'"),
    ],
)
def test_models_that_cannot(family, options, message):
    with pytest.raises(UnsupportedModelError, match=message):
        compressed(family, **options)


def test_a_run_of_codes_is_no_longer_than_the_tensor():
    """So that what a config says costs no more memory than the file has."""
    module = QuantizedTensor((4, 4), 4, 2**31 - 1)
    assert module.chunk == 16 and module.scale.shape == (1,) and module.weight.shape == (4, 4)


@torch.no_grad()
def test_a_mask_of_flash_attention_hides_what_the_usual_one_hides():
    """It says of every row which tokens are there; here of the second row only not all of them are."""
    model, _ = compressed("opt", shared_qkv=True, sparsity=0.5)
    attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
    x, there = torch.randn(2, 7, model.config.hidden_size), torch.ones(2, 7, dtype=torch.long)
    there[1, :3] = 0

    def decoded(mask):
        cache = DynamicCache()
        attention.mix(x[:, :6], cache)
        return attention.mix(x[:, 6:], cache, attention_mask=mask)[0]

    expected = decoded(there[:, None, None].bool())
    assert attention.latent_keys and torch.equal(decoded(there), expected)
    assert not torch.allclose(expected, decoded(None))
