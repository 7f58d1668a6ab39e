"""Every kind of calibration data gives the samples that it holds, cut, drawn and held out as those of a text."""

import itertools

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPImageProcessorPil

import rankfold
from families import opened, some_ids
from rankfold.data import streaming
from rankfold.data.batches import Example
from rankfold.data.calibration_data import upgrade_calibration
from rankfold.errors import DataError, OptionError, RankfoldError
from tiny_encoders import opened_encoder
from tiny_pairs import FAMILIES, picture, tokenizer
from tiny_pairs import opened as opened_pair

ROWS = some_ids(20, 24, seed=3)
TEXTS = [f"text number {i} with " + " ".join(f"word{j}" for j in range(i, i + 9)) for i in range(40)]
TURNS = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "that is a model."}]


@pytest.fixture(scope="module")
def model():
    return opened("llama").with_tokenizer(tokenizer())


def load(data, model, **options):
    return rankfold.load_calibration(data, model, **{"num_samples": 16, "max_length": 24, "seed": 5} | options)


def rows_of(found) -> list[tuple[int, ...]]:
    """Fitted and held-out sequences."""
    together = [*found.ids, *(found.held_out if found.held_out is not None else ())]
    return [tuple((row.ids[0] if isinstance(row, Example) else row).tolist()) for row in together]


def in_order(rows) -> list[tuple[int, ...]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()
    return [tuple(rows[i].tolist()) for i in order]


def batches_of(rows, size=6, **more):
    return [{"input_ids": rows[i : i + size], **more} for i in range(0, len(rows), size)]


DRAWN = {  # read in any order, so in the order of the seed
    "Tensor": ROWS,
    "int32": ROWS.int(),
    "list": list(ROWS),
    "lists": ROWS.tolist(),
    "column": datasets.Dataset.from_dict({"input_ids": ROWS.tolist()})["input_ids"],
    "of (1, T)": [row[None] for row in ROWS],
    "ndarray": ROWS.numpy(),
    "Dataset": datasets.Dataset.from_dict({"input_ids": ROWS.tolist(), "label": [0] * 20}),
    "tensors": datasets.Dataset.from_dict({"input_ids": ROWS.tolist()}).with_format("torch"),
    "tables": datasets.Dataset.from_dict({"input_ids": ROWS.tolist()}).with_format("pandas"),
    "rows": [{"input_ids": row.tolist(), "labels": row} for row in ROWS],
    "TensorDataset": TensorDataset(ROWS),
}
FIRST = {  # streams, of which the first rows are taken
    "DataLoader": lambda: DataLoader(DRAWN["tensors"], batch_size=6),
    "of tensors": lambda: DataLoader(TensorDataset(ROWS), batch_size=7),
    "generator": lambda: iter(batches_of(ROWS, attention_mask=torch.ones(6, 24))[:3]),
    "endless": lambda: itertools.cycle(batches_of(ROWS)),
    "one batch": lambda: {"input_ids": ROWS[:18], "attention_mask": torch.ones(18, 24)},
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAWN)
def test_rows_of_ids_are_drawn_by_the_seed(kind, model):
    found = load(DRAWN[kind], model)
    assert found.ids.dtype is torch.int64 and found.ids.shape == (16, 24) and found.held_out.shape == (2, 24)
    assert rows_of(found) == in_order(ROWS)[:18]
    described = found.describe()
    assert described["source"] == type(DRAWN[kind]).__name__ and described["origin"] == "memory"
    assert (described["num_samples"], described["max_length"], described["held_out"]) == (16, 24, 2)
    assert described == load(DRAWN[kind], model).describe() != load(DRAWN[kind], model, seed=6).describe()


@pytest.mark.parametrize("kind", FIRST)
def test_of_a_stream_the_first_rows_are_taken(kind, model):
    found = load(FIRST[kind](), model)
    assert rows_of(found) == [tuple(row.tolist()) for row in ROWS[:18]]
    assert (len(found.ids), len(found.held_out)) == (16, 2)


def test_rows_are_cut_to_the_length_and_to_the_context(model):
    long = some_ids(4, 100)
    assert load(long, model, max_length=10).ids.equal(load(long[:, :10], model).ids)
    assert load(long, model, max_length=2048).ids.shape == (3, model.context_length)


def test_one_row_is_fitted(model):
    found = load(ROWS[:1], model)
    assert found.ids.equal(ROWS[:1]) and found.held_out is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_measured(side, model):
    """The moments of a padded batch are those of its sequences run one by one."""
    lengths, batch, mask = (5, 24, 9, 13), torch.zeros(4, 24, dtype=torch.long), torch.zeros(4, 24, dtype=torch.long)
    for i, length in enumerate(lengths):
        place = slice(24 - length, None) if side == "left" else slice(length)
        batch[i, place], mask[i, place] = ROWS[i, :length], 1
    found = load([{"input_ids": batch, "attention_mask": mask}], model, num_samples=3)
    assert rows_of(found) == [tuple(ROWS[i, :length].tolist()) for i, length in enumerate(lengths)]
    assert found.kind == "sequences" and found.describe()["tokens"] == 5 + 24 + 9 and found.max_length == 24
    moments = rankfold.calibrate(model, found, statistics={"mlp_hidden"})[0]["mlp_hidden"]
    alone = [
        rankfold.calibrate(model, load(ROWS[i : i + 1, :length], model), statistics={"mlp_hidden"})[0]["mlp_hidden"]
        for i, length in enumerate(lengths[:3])
    ]
    assert moments.count == sum(one.count for one in alone) == 38
    torch.testing.assert_close(moments.second, sum(one.second for one in alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("allocation", ["uniform", "measured"])
def test_sequences_of_several_lengths_compress_and_resume(allocation, model, tmp_path):
    data = load([ROWS[i, : 8 + i] for i in range(12)], model, num_samples=8)
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2, allocation=allocation)
    folder = rankfold.compress(model, method=method, calibration=data, output=tmp_path / "small").output
    record = rankfold.load(folder, device="cpu").hf_quantizer.quantization_config.fields["calibration"]
    assert record == data.describe() and record["kind"] == "sequences"
    moments = rankfold.calibrate(model, data, tmp_path / "moments")
    assert rankfold.MomentStore.open(tmp_path / "moments").identity == moments.identity


def test_the_encoding_of_a_file_with_rows_is_told(model, tmp_path, subtests):
    """Of a .jsonl file the first row is looked at for images before it is read as text."""
    file = tmp_path / "rows.jsonl"
    for encoding, message in {"utf-16": "is UTF-16 or UTF-32, or no text", "latin-1": "is not UTF-8 text"}.items():
        with subtests.test(encoding=encoding), pytest.raises(DataError, match=rf"rows\.jsonl {message}.*; convert it"):
            file.write_bytes('{"text": "é"}\n'.encode(encoding))
            rankfold.load_calibration(str(file), model)


def test_texts_rows_and_data_sets_give_what_a_file_of_them_gives(model, tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(tmp_path / "a.jsonl")
    expected = load(tmp_path / "a.jsonl", model)
    for data in (
        TEXTS,
        tuple(TEXTS),
        [{"text": text} for text in TEXTS],
        datasets.Dataset.from_dict({"text": TEXTS, "n": range(40)}),
        datasets.Dataset.from_dict({"n": range(40), "text": TEXTS}).with_format("torch"),
        datasets.Dataset.from_dict({"n": range(40), "text": TEXTS}).with_format("pandas"),
        datasets.Dataset.from_dict({"n": range(40), "text": TEXTS}).with_format("arrow"),
    ):
        found = load(data, model)
        assert found.ids.equal(expected.ids) and found.held_out.equal(expected.held_out)
        assert found.draw == expected.draw and found.describe()["source"] == type(data).__name__
    stream = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    expected_of_it = load(stream, model).ids
    for form in ("pandas", "arrow"):
        assert load(stream.with_format(form), model).ids.equal(expected_of_it)
    body = load(datasets.Dataset.from_dict({"text": ["no"] * 40, "body": TEXTS}), model, text_column="body")
    assert body.ids.equal(expected.ids) and body.describe()["text_column"] == "body"


def test_chats_are_written_by_the_template(model, tmp_path):
    speaking = tokenizer()
    speaking.chat_template = "{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }}\n{% endfor %}"
    written = "[user]what is it?\n[assistant]that is a model.\n" * 30
    expected = speaking(written, add_special_tokens=False, return_tensors="pt").input_ids[0]
    for data in (
        [{"messages": TURNS}] * 30,
        [TURNS] * 30,
        datasets.Dataset.from_list([{"messages": TURNS}] * 30),
    ):
        found = load(data, model, tokenizer=speaking)
        windows = expected[: len(expected) // 24 * 24].view(-1, 24)
        assert rows_of(found) == in_order(windows)[:18]
    with pytest.raises(DataError, match="row 0 is a chat, and the tokenizer of .* has no chat template"):
        load([{"messages": TURNS}] * 30, model)


def test_large_data_is_drawn_from_and_streams_are_shuffled(model, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 500)
    monkeypatch.setattr("rankfold.data.in_memory.BUFFER", 7)
    rows = datasets.Dataset.from_dict({"text": [text.replace(" ", f"{i:02d}") for i, text in enumerate(TEXTS)]})
    drawn, stream = load(rows, model), load(rows.to_iterable_dataset(), model)
    plain = load((text for text in rows["text"]), model)
    assert [one.draw for one in (drawn, stream, plain)] == ["rows", "stream, buffer of 7 rows", "first rows"]
    assert len({one.sha256 for one in (drawn, stream, plain)}) == 3
    assert load(rows.to_iterable_dataset(), model).describe() == stream.describe()
    texts = tokenizer()(list(rows["text"])).input_ids
    for found in (drawn, stream, plain):
        assert all(any(str(row)[1:-1] in str(text)[1:-1] for text in texts) for row in map(list, rows_of(found)))


def test_another_tokenizer_reads_the_text(model):
    def shifted(text, **options):
        found = tokenizer()(text, **options)
        found["input_ids"] = (found["input_ids"] + 1) % 90
        return found

    mine, other = load(TEXTS, model), load(TEXTS, model, tokenizer=shifted)
    assert other.ids.equal((mine.ids + 1) % 90) and model.tokenizer("a").input_ids == tokenizer()("a").input_ids


def test_a_list_is_one_of_names_or_one_of_texts(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b b.txt"):
        (tmp_path / name).write_text(f"{name} " * 100)
    names = load(["a.txt", "b b.txt"], model)
    assert [text.name for text in names.texts] == ["a.txt", "b b.txt"]
    assert load(["x" * 300] * 2, model).name == "list" and load(["", " = Title = \n", *TEXTS], model).name == "list"
    for data, error, message in (
        (["a.txt", "some text of mine"], OptionError, "'a.txt' names a text and 'some text of mine' does not; give"),
        (["a.txt", "typo.txt"], OptionError, "'a.txt' names a text and 'typo.txt' does not"),
        (["typo.txt"], DataError, "no text at 'typo.txt': expected .*, self, mixture, or a .*/.csv/.tsv/.parquet"),
        ([tmp_path / "typo.txt"], DataError, "no text at '.*typo.txt'"),
        (["pydocs", "wikitex2"], DataError, "did you mean 'pydoc'"),
        ([], OptionError, "no calibration text is named; give at least one"),
        ([""], DataError, "the calibration data, a list, holds no text; give texts"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            load(data, model)


def test_calibration_data_comes_back_as_it_is(model):
    data = load(ROWS, model)
    assert rankfold.load_calibration(data, model, num_samples=1) is data


def test_images_in_memory():
    source, processor = opened_encoder("clip-vision"), CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    pictures = [picture(i) for i in range(12)]
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    for data in (pixels, list(pixels), [{"pixel_values": image[None]} for image in pixels]):
        found = load(data, source, num_samples=8)
        assert torch.cat([found.ids, found.held_out]).equal(pixels[order][:9]) and found.kind == "images"
        assert found.tokens == 8 * found.max_length > 8
    known = {image.numpy().tobytes() for image in pixels}
    features = datasets.Features({"photo": datasets.Image()})
    for data, column in (
        (pictures, "text"),
        ([{"photo": image} for image in pictures], "photo"),
        (datasets.Dataset.from_dict({"photo": pictures}, features=features), "photo"),
    ):
        found = load(data, source, num_samples=8, tokenizer=processor, text_column=column)
        drawn = {image.numpy().tobytes() for image in (*found.ids, *found.held_out)}
        assert (len(found.ids), len(found.held_out), len(drawn)) == (8, 1, 9) and drawn <= known
    with pytest.raises(OptionError, match="the vision component of .* takes images, got list; give a folder of them"):
        load(TEXTS, source)


def test_image_text_examples_in_memory(tmp_path):
    source, processor = opened_pair("llava"), FAMILIES["llava"].processor()
    rows = [{"question": f"what is {i}?", "image": picture(i) if i % 3 else None, "answer": "it"} for i in range(12)]
    found = load(rows, source, num_samples=8, tokenizer=processor)
    assert found.kind == "image-text examples" and (len(found.ids), len(found.held_out)) == (8, 1)
    batches = [{**example.read()} for example in found.ids]
    again = load(batches, source, num_samples=8, seed=0)
    assert {example.sha256 for example in (*again.ids, *again.held_out)} == {example.sha256 for example in found.ids}
    with pytest.raises(DataError, match="row 0: images and texts of several rows cannot be told apart"):
        load([{name: torch.cat([value, value]) for name, value in batches[0].items()}], source)


GOOD = {"input_ids": ROWS[:4]}
MASK = torch.ones(4, 24)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [GOOD | {"attention_mask": MASK.index_fill(1, torch.tensor(5), 0)}],
            "attention_mask leaves out tokens between",
        ),
        ([GOOD | {"attention_mask": MASK[:2]}], "attention_mask has 2 rows and input_ids 4; give a mask for each"),
        ([GOOD | {"attention_mask": MASK[:, :9]}], "attention_mask has 9 entries for 24 tokens; give one for each"),
        ([GOOD | {"attention_mask": MASK[:, None, None]}], r"attention_mask must be .* got shape \[4, 1"),
        ([GOOD | {"position_ids": ROWS[:4]}], "row 0: position_ids cannot be honoured; give sequences one by one"),
        ([GOOD | {"token_type_ids": MASK.long()}], "token_type_ids cannot be honoured"),
        ([GOOD, {"labels": ROWS}], "list, row 1: input_ids must be whole numbers .* got NoneType"),
        (torch.zeros(4, 8), r"row \d: input_ids must be whole numbers, got torch.float32"),
        (ROWS.bool(), "must be whole numbers, got torch.bool"),
        (-ROWS, "holds the negative token id .*; padding needs an attention_mask"),
        (ROWS + 10**6, "token id .*, the model has .* embeddings"),
        (ROWS[:, :1], "has no sequence of at least 2 tokens; give longer ones"),
        (ROWS[:0], "the calibration data is an empty Tensor; give at least one sample"),
        (torch.tensor(3), "the calibration data is an empty Tensor"),
        (iter(()), "the calibration data is an empty tuple_iterator"),
        (["   ", " "], "the calibration data, a list, holds no text; give texts"),
        (["", ""], "the calibration data, a list, holds no text; give texts"),
        ([{"body": "x"}], "list, row 0 has no text column 'text'; the row has: body .use text_column."),
        ([{"text": 3}], "row 0: column 'text' holds int, not text"),
        ([{"text": "a b"}, 3], "row 1 has no text column 'text'; the row is a int"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}),
            "choose one of its splits: train",
        ),
        (torch.zeros(2, 3, 8, 8), "takes token ids, got images; calibrate on text"),
        (7, "calibration data is the name of a text, .*; got int$"),
        ({"a", "b"}, "; got set$"),
        (b"text", "; got bytes$"),
        ([[True, False]], "must be whole numbers, got torch.bool"),
        ([[1, 2.5]], "must be whole numbers, got torch.float32"),
        ([["a"]], "list of list"),
        ([object()], "; got list of object$"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(data, message, model):
    with pytest.raises((DataError, OptionError), match=message) as error:
        load(data, model)
    assert "\n" not in str(error.value)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.floats(), st.text(max_size=8), st.binary(max_size=4),
    st.sampled_from([torch.float32, torch.zeros(2, 4), ROWS[:2], ROWS[0], torch.tensor(1), np.ones(3), object(), len]),
    st.sampled_from([torch.nn.Linear(2, 2), Image.new("RGB", (2, 2))]),
)  # fmt: skip
names = st.sampled_from(["input_ids", "attention_mask", "text", "messages", "pixel_values", "image", "position_ids"])
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything)
@example({"attention_mask": None, "pixel_values": None, "input_ids": (ROWS[0],)})
def test_anything_else_is_refused_in_a_line_of_our_own(model, data):
    try:
        load(data, model)
    except RankfoldError as error:
        assert "\n" not in str(error) and "this is a bug" not in str(error)


def test_descriptions_of_earlier_versions_are_read():
    text = {"source": "a.txt", "origin": "file:1", "draw": "rows", "share": 0.5, "samples": 3, "held_out": 1}
    old = {
        "source": "a",
        "samples": 6,
        "length": 32,
        "tokens": 192,
        "field": "body",
        "samples_wanted": 8,
        "texts": [text],
    }
    new = {
        "source": "a",
        "num_samples": 6,
        "max_length": 32,
        "tokens": 192,
        "text_column": "body",
        "num_samples_wanted": 8,
    }
    new |= {"texts": [{key: value for key, value in text.items() if key != "samples"} | {"num_samples": 3}]}
    assert upgrade_calibration({"calibration": old, "mode": "x"}) == {"calibration": new, "mode": "x"}
    assert upgrade_calibration({"tokens": old, "before": {"calibration": old}}) == {
        "tokens": new,
        "before": {"calibration": new},
    }
    assert upgrade_calibration({"calibration": new}) == {"calibration": new}
    longest = {"length": 5, "longest": 9, "kind": "image-text examples"}
    assert upgrade_calibration({"calibration": longest})["calibration"] == {
        "max_length": 9,
        "kind": "image-text examples",
    }
    compared = {"measures": {"texts": [{"field": "body", "name": "a"}, 3], "kind": "x"}}
    assert upgrade_calibration(compared) == {
        "measures": {"texts": [{"text_column": "body", "name": "a"}, 3], "kind": "x"}
    }
    for damaged in (None, [], {"calibration": 3}, {"calibration": {"texts": 3}}, {"calibration": {"texts": [3]}}):
        assert upgrade_calibration(damaged) == damaged


def test_moments_of_an_earlier_version_are_read_and_continued(model, tmp_path):
    """As it wrote them: other keys in the record, and in the digest of every block."""
    data = load(ROWS, model)
    now = rankfold.calibrate(model, data, statistics={"mlp_hidden"})
    names = {"num_samples": "samples", "max_length": "length", "num_samples_wanted": "samples_wanted"}
    tokens = {names.get(key, key): value for key, value in data.describe().items()}
    with rankfold.MomentStore.filling(now.identity | {"tokens": tokens}, tmp_path / "old", data.held_out) as store:
        for index in range(len(model)):
            store[index] = now[index]
    opened_again = rankfold.MomentStore.open(tmp_path / "old")
    assert opened_again.identity == now.identity and not opened_again.missing(len(model))
    assert opened_again[0]["mlp_hidden"].second.equal(now[0]["mlp_hidden"].second)
    (tmp_path / "old" / "block-00001.safetensors").unlink()
    continued = rankfold.calibrate(model, data, tmp_path / "old", statistics={"mlp_hidden"})
    assert not continued.missing(len(model)) and not rankfold.MomentStore.open(tmp_path / "old").missing(len(model))


def test_rows_and_strings_of_other_libraries_are_texts(model):
    texts = [f"a class of {n} values and a list of them, number {n}. " * 20 for n in range(30)]
    expected = load(texts, model)
    more = pandas.DataFrame({"text": ["left out", *texts]})
    for data in (
        pandas.DataFrame({"text": texts}),
        pandas.Series(texts),
        more[more.text != "left out"],
        more.text[1:],  # without a row 0
        pyarrow.table({"text": texts}),
        pyarrow.chunked_array([texts]),
        np.array(texts),
        np.array(texts, dtype=object),
    ):
        assert load(data, model).ids.equal(expected.ids), type(data)


def test_a_model_of_text_alone_takes_the_text_beside_pictures(model):
    rows = [{"image": n, "text": f"a class of {n} values and a list of them, number {n}. " * 20} for n in range(30)]
    assert load(rows, model).ids.equal(load([{"text": row["text"]} for row in rows], model).ids)


def test_a_word_as_long_as_the_name_of_a_file_may_be_one(model):
    with pytest.raises(DataError, match="no text at 'x{255}'"):
        load(["x" * 255], model)
    assert len(load(["x" * 256] * 8, model).ids)


@pytest.mark.parametrize("text", ["word " * 100, "two\nlines"])
def test_a_text_by_itself_is_told_from_a_name(text, model):
    with pytest.raises(DataError, match="a text itself is given in a list, or as a file"):
        load(text, model)


@pytest.mark.parametrize("shards", [0, -1])
def test_samples_made_by_hand_have_a_shard_at_least(shards):
    with pytest.raises(OptionError, match=f"shards must be >= 1, got {shards}"):
        rankfold.CalibrationData(torch.ones(2, 4).long(), "x", "x", 0, shards=shards)
