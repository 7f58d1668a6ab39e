"""The size of a GGUF file in place of a sparsity: what is predicted is what is written, and no more than was asked."""

import pytest

import rankfold
from families import tokens
from rankfold._utils.sizes import size_text
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.exports.gguf_blocks import FORMATS, ROUNDED
from rankfold.exports.gguf_layout import FLOATS
from rankfold.exports.gguf_size import bytes_of
from rankfold.report.goal import GGUF_DTYPES, asked_and_got
from saved import save_tiny

SHAPES = {
    "whole blocks": {"hidden_size": 64, "intermediate_size": 192},
    "rows of no whole blocks": {"hidden_size": 48, "intermediate_size": 160},
    "a head of its own": {"hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": False},
    "biases": {"hidden_size": 64, "intermediate_size": 192, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"hidden_size": 64, "intermediate_size": 192, "family": "qwen2"},
}
ONE_WIDTH = {  # for all MLPs
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "gemma3": {"family": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
}
BRIEF = {"calibration": ["some words and more of them, one after another. " * 40], "num_samples": 2, "max_length": 32}


def dense(folder, **options):
    save_tiny(folder, blocks=3, **options)
    source = rankfold.open_model(folder, device="cpu")
    source.autocast = None
    return source


def sized(source, size, dtype, **options):
    options = {"method": "modegpt", "mode": "one-pass", "calibration": tokens()} | options
    return rankfold.compress(source, target_size=f"{size}:{dtype}", **options)


def options_of(record):
    return {key: value for key, value in record["plan"]["method"].items() if key != "method"}


@pytest.mark.parametrize("dtype", GGUF_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_file_has_the_bytes_that_the_record_says_and_no_more_than_was_asked_for(tmp_path, shape, dtype):
    source = dense(tmp_path / "model", **SHAPES[shape])
    full = source.meta_block(0).mlp.hidden
    most, least = (sum(bytes_of(source, [width] * 3, dtype)) for width in (full, 32))
    asked = (most + 2 * least) // 3
    found = sized(source, asked, dtype, output=tmp_path / "small")
    rankfold.export(
        tmp_path / "small", tmp_path / "x.gguf", "gguf-deci", dtype=dtype, **(BRIEF if dtype in ROUNDED else {})
    )
    taken, goal = (tmp_path / "x.gguf").stat().st_size, found.record["goal"]
    assert (goal["asked"], goal["got"], goal["dtype"]) == (asked, taken, dtype)
    assert asked - 1.05 * (most - least) / (3 * (full - 32) / 32) < taken <= asked  # at most one step of 32 units below


@pytest.mark.parametrize("dtype", GGUF_DTYPES)
@pytest.mark.parametrize("family", ONE_WIDTH)
def test_a_file_of_one_width_for_all_has_these_bytes_too(tmp_path, family, dtype):
    source = dense(tmp_path / "model", hidden_size=64, intermediate_size=192, **ONE_WIDTH[family])
    step = 32 if dtype in FORMATS else 8
    sizes = [sum(bytes_of(source, [192 - step * taken] * 3, dtype)) for taken in (2, 3)]
    for asked, wanted in ((sizes[0], sizes[0]), (sizes[0] - 1, sizes[1])):
        folder = tmp_path / str(asked)
        record = sized(source, asked, dtype, output=folder).record
        assert record["goal"]["got"] == wanted
        method = rankfold.make_method(record["method"], **options_of(record))  # as --config repeats it
        planned = rankfold.plan(source, target_size=f"{asked}:{dtype}", method=method)
        assert planned.file == {"dtype": dtype, "bytes": wanted} == planned.to_dict()["file"]
        assert [f"GGUF file in {dtype}", "", size_text(wanted)] in [list(row) for row in planned._sizes()]
    how = BRIEF if dtype in ROUNDED else {}
    rankfold.export(folder, tmp_path / "x.gguf", "gguf", dtype=dtype, **how)
    assert (tmp_path / "x.gguf").stat().st_size == wanted


@pytest.mark.parametrize("dtype", ["q4_0", "float32"])
def test_a_size_that_a_step_of_widths_meets_to_the_byte_takes_no_step_more_and_a_byte_less_takes_one(tmp_path, dtype):
    source = dense(tmp_path / "model", **SHAPES["whole blocks"])
    sizes = [sum(bytes_of(source, [192, 192, 192 - 32 * step], dtype)) for step in (1, 2, 3, 4)]
    for asked, most in ((sizes[0], sizes[0]), (sizes[0] - 1, sizes[1]), (sizes[2], sizes[2]), (sizes[2] - 1, sizes[3])):
        goal = sized(source, asked, dtype).record["goal"]
        assert goal["got"] == most or goal["got"] == sum(bytes_of(source, [160] * 3, dtype)) < asked  # settings of one
    assert asked_and_got({"goal": goal}) == (
        f"asked for at most {size_text(asked)} as a GGUF file in {dtype}: got {size_text(goal['got'])}"
    )


def test_the_dtypes_are_those_of_an_export():
    assert {*GGUF_DTYPES} == {*FLOATS} | {*FORMATS}


@pytest.mark.parametrize(
    "sizes, size, options, message",
    [
        ({"intermediate_size": 172}, "90kB:q8_0", {}, "MLPs 172 wide, which q8_0 cannot hold: its blocks are 32"),
        (
            {"intermediate_size": 32},
            "60kB:q4_0",
            {},
            "with the narrowest MLPs that llama.cpp takes, the file of",
        ),
        ({}, "1MB:q4_0", {}, r"that of model takes 1\d\d\.\d\d kB in q4_0 as it is; export it, or give a smaller size"),
        ({}, "10kB:q4_0", {}, "target_size 10.00 kB cannot be reached: .* takes 88.74 kB; give a larger"),
        (
            {},
            "100kB:q4_0",
            {"exclude_blocks": (0, 1)},
            "target_size 100.00 kB of .* is a sparsity of .*, a larger size",
        ),
        ({}, "90kB:q4", {}, "unknown dtype of a GGUF file in target_size 'q4'; did you mean 'q4_0'"),
        ({}, "much:q4_0", {}, "target_size takes a size above 0, such as 400MB"),
        ({}, ":q4_0", {}, "target_size takes a size above 0, such as 400MB"),
        ({}, "90kB:q4_0", {"method": "svd-llm"}, "that of a file for llama.cpp, and method svd-llm does not"),
        ({}, "90kB:q4_0", {"head_dim": 8}, "method modegpt changes qk, vo; give a size without a dtype"),
        ({}, "90kB:q4_0", {"target": "vllm"}, "target llama.cpp, so target vllm would have no effect; leave it out"),
        ({}, "90kB:q4_0", {"gpu": "80GB"}, "a GGUF file holds a tokenizer of transformers, and model has none"),
        ({"family": "olmo2"}, "90kB:q4_0", {}, "gemma3_text, got olmo2; give target_size without a dtype"),
        (
            {"family": "qwen3", "attention_bias": True},
            "90kB:q4_0",
            {},
            "no GGUF file of model to size: llama.cpp's qwen3 has no biases, which this model has; give target_size",
        ),
        (
            {"family": "qwen3"},
            "90kB:q4_0",
            {"allocation": "owl"},
            "takes target stock and allocation uniform, so allocation owl.* would",
        ),
        ({"family": "qwen3"}, "10kB:q4_0", {}, "cannot be reached: with the narrowest MLPs"),
    ],
)
def test_a_size_that_no_file_can_have_is_refused_with_the_reason(tmp_path, sizes, size, options, message):
    save_tiny(tmp_path / "model", blocks=3, **{"hidden_size": 64, "intermediate_size": 192} | sizes)
    how = {"method": "modegpt"} | options
    with pytest.raises((OptionError, UnsupportedModelError), match=message):
        rankfold.plan(tmp_path / "model", target_size=size, **how, **({} if "gpu" in how else {"device": "cpu"}))
