"""`--config`: what a record holds is what the options would give, and options given beside it come first."""

import json
from dataclasses import fields

import pytest
import typer

from compared import METHODS, config
from rankfold.cli.app import app
from rankfold.cli.calibration import CalibrationOptions
from rankfold.cli.command import UsageError
from rankfold.cli.options import MethodOptions
from rankfold.errors import CheckpointError, OptionError
from rankfold.methods import make_method
from rankfold.recovery.options import Options

CALIBRATION = {"source": "a text.txt", "samples": 4, "length": 32, "tokens": 128, "seed": 1, "sha256": ""}
COUNTED = ("counted_weights", "removed_weights", "parameters", "bytes", "kv_bytes_per_token")
PLANNED = dict.fromkeys((*COUNTED, "parameters_after", "bytes_after", "kv_bytes_per_token_after", "sparsity"), 0)
METHODS_WITH_OPTIONS = [
    ("rankfold", {}),
    ("modegpt", {"modules": {"mlp": 0.2}, "sparsity": 0.5}),
    ("modegpt", {"modules": ("mlp", "vo"), "ridge": 0.0625, "bias_refit": False}),
    ("modegpt", {"allocation": "influence-modules:temperature=0.5"}),
    ("modegpt", {"budget": "bytes:context=64,batch=8"}),
    ("modegpt", {"allocation": "influence:temperature=1e-07", "exclude_blocks": (0, -1)}),
    ("sleb", {"exclude_blocks": (1,)}),
    ("modegpt", {"allocation": "owl:threshold=3.0,spread=0.1", "scope": "model", "rank_multiple": 4}),
    ("rankfold", {"target": "stock", "allocation": "uniform", "head_dim": 8}),
]


def record_of(method, **facts) -> dict:
    plan = {"model": "m", "method": method.describe(), "modules": [], "part": None, "facts": {}, **PLANNED}
    given = {
        "base_model": "owner/my model",
        "calibration": CALIBRATION,
        "mode": "sequential",
        "dtype": "float32",
        "plan": plan,
    }
    needed = {"rankfold_version": "0", "method": method.name, "blocks": {}}
    needed["run"] = {"seconds": {"total": 1}, "estimated": {"peak_memory_bytes": 0}}
    return needed | {"counts": {"sparsity": 0.3, **dict.fromkeys(COUNTED, 0)}} | given | facts


def parsed(tmp_path, record: dict, *arguments: str, command: str = "compress") -> dict:
    (tmp_path / "record.json").write_text(json.dumps(record))
    line = ["--config", str(tmp_path / "record.json"), *arguments]
    return typer.main.get_command(app).commands[command].make_context(command, line).params


def group(cls, params: dict):
    return cls(**{field.name: params[field.name] for field in fields(cls)})


@pytest.mark.parametrize(("name", "options"), METHODS_WITH_OPTIONS)
@pytest.mark.parametrize("command", ["compress", "plan"])
def test_a_record_gives_its_method_and_its_calibration(tmp_path, name, options, command):
    method = make_method(name, **options)
    params = parsed(tmp_path, record_of(method), command=command)
    assert group(MethodOptions, params).parse() == method
    assert group(CalibrationOptions, params) == CalibrationOptions(["a text.txt"], 4, 32, 1)
    assert (params["model"], params["dtype"], params["component"]) == ("owner/my model", "float32", None)
    assert params.get("mode", "sequential") == "sequential"


def test_everything_that_is_not_as_by_default_is_repeated(tmp_path):
    texts = [{"source": "a.txt", "share": 0.7}, {"source": "b=1.txt", "share": 0.3}]
    drawn = CALIBRATION | {"texts": texts, "samples_wanted": 9, "field": "a body"}
    record = record_of(make_method("modegpt"), calibration=drawn, revision="abc", mode="one-pass")
    record["plan"]["part"] = "language"
    params = parsed(tmp_path, record)
    calibration = CalibrationOptions(["a.txt=0.7", "b=1.txt=0.3"], 9, 32, 1, "a body")
    assert group(CalibrationOptions, params) == calibration
    assert (params["model"], params["mode"], params["component"]) == ("owner/my model@abc", "one-pass", "language")
    images = parsed(tmp_path, record_of(make_method("modegpt"), calibration=CALIBRATION | {"kind": "images"}))
    assert images["max_length"] == CalibrationOptions().max_length


def test_a_record_of_a_local_model_asks_for_its_path(tmp_path):
    with pytest.raises(OptionError, match="a record has of a local model the name only; give MODEL too"):
        parsed(tmp_path, record_of(make_method("modegpt"), base_model="of mine"))


TRAINED = {
    **{"tune": "lora", "loss": "both", "tokens": 99, "rank": 3, "lr": 0.5, "batch_tokens": 7, "tolerance": 0.1},
    **{"seed": 4, "text_column": "body", "minutes": None, "adapter": True},
}


def test_a_training_is_repeated_with_every_option_that_its_weights_depend_on(tmp_path):
    asked = {field.name for field in fields(Options)} | {"minutes", "adapter", "calibration"}
    facts = TRAINED | {"length": 16, "calibration": {"a.txt": 0.7, "b=1.txt": 0.3}}
    assert set(facts) == asked  # a new option has to be repeated too

    def repeated(*more: str, **other) -> dict:
        line = ["small", "-o", "again", *more]
        return parsed(tmp_path, {"recovery": facts | other}, *line, command="recover")

    expected = TRAINED | {"max_length": 16, "calibration": ["a.txt=0.7", "b=1.txt=0.3"], "blockwise": False}
    params = repeated()
    assert {key: params[key] for key in expected} == expected
    over = {"tokens": 5, "calibration": ["c.txt"]}
    params = repeated("--tokens", "5", "--calibration", "c.txt")
    assert {key: params[key] for key in expected} == expected | over
    params = repeated(blockwise=True, loss="states")
    assert (params["blockwise"], params["loss"]) == (True, "kl")
    assert "lr" not in repeated(lr=None) or repeated(lr=None)["lr"] is None  # a fraction of the size of the weights
    params = repeated(minutes=2.5)
    assert (params["tokens"], params["minutes"]) == (99, None)  # as many, however fast this machine is
    with pytest.raises(CheckpointError, match="recovery"):
        parsed(tmp_path, {}, "small", "-o", "again", command="recover")


def test_options_beside_it_come_first_and_settings_by_key(tmp_path):
    record = record_of(make_method("modegpt", sparsity=0.2, ridge=0.5, selection="leverage", rank_multiple=2))
    line = ["other", "--sparsity", "0.4", "--set", "ridge=0.25", "--calibration", "x.txt", "--seed", "7"]
    params = parsed(tmp_path, record, *line)
    expected = make_method("modegpt", sparsity=0.4, ridge=0.25, selection="leverage", rank_multiple=2)
    assert group(MethodOptions, params).parse() == expected
    assert group(CalibrationOptions, params) == CalibrationOptions(["x.txt"], 4, 32, 7)
    assert params["model"] == "other"


@pytest.mark.parametrize(("dtype", "size"), [(None, "85000000"), ("q4_0", "85000000:q4_0")])
def test_a_size_is_repeated_as_a_size_unless_another_amount_is_given(tmp_path, dtype, size):
    goal = {"option": "target_size", "asked": 85_000_000, "got": 84_000_000, "earlier_runs": []}
    goal |= {"dtype": dtype} if dtype else {}
    record = record_of(make_method("modegpt", sparsity=0.09, scope="model"), goal=goal)
    assert parsed(tmp_path, record)["target_size"] == size
    assert parsed(tmp_path, record, "--target-size", "9MB")["target_size"] == "9MB"
    for other in (("--sparsity", "0.2"), ("--keep-quality", "0.9"), ("--scope", "blocks"), ("--budget", "flops")):
        assert parsed(tmp_path, record, *other)["target_size"] is None
    kept = record_of(make_method("modegpt", sparsity=0.09), goal=goal | {"option": "keep_quality", "asked": 0.9})
    assert parsed(tmp_path, kept)["target_size"] is parsed(tmp_path, kept)["keep_quality"] is None


def test_another_method_takes_none_of_the_options_of_the_first(tmp_path):
    record = record_of(make_method("modegpt", sparsity=0.2, selection="leverage", allocation="owl", rank_multiple=2))
    params = parsed(tmp_path, record, "--method", "rankfold")
    assert group(MethodOptions, params).parse() == make_method("rankfold", sparsity=0.2, rank_multiple=2)
    same = parsed(tmp_path, record, "--method", "modegpt")
    assert group(MethodOptions, same).parse().selection == "leverage"


def test_a_record_of_before_has_other_names_and_lacks_options(tmp_path):
    record = record_of(make_method("modegpt"))
    old = {
        "of": "model",
        "multiple": 2,
        "select": "leverage",
        "allocation": "influence",
        "epsilon": 0.5,
        "protect": [0],
    }
    record["plan"]["method"] = {"method": "modegpt", "sparsity": 0.2, "modules": ["mlp"]} | old
    new = {"scope": "model", "rank_multiple": 2, "selection": "leverage", "allocation": "influence:temperature=0.5"}
    expected = make_method("modegpt", sparsity=0.2, modules=("mlp",), exclude_blocks=(0,), **new)
    assert group(MethodOptions, parsed(tmp_path, record)).parse() == expected


def test_every_component_has_its_own_method_and_calibration(tmp_path):
    first = record_of(
        make_method("modegpt", sparsity=0.2, exclude_blocks=(0,)), calibration=CALIBRATION | {"source": "images"}
    )
    record = record_of(make_method("modegpt", sparsity=0.4), before=first)
    first["plan"]["part"], record["plan"]["part"] = "vision", "language"
    params = parsed(tmp_path, record)
    assert (params["components"], params["component"]) == ("vision=0.2,language=0.4", None)
    vision, language = params["config"]
    assert (vision["exclude_blocks"], language["exclude_blocks"]) == ("0", "")
    assert (vision["calibration"], language["calibration"]) == (["images"], ["a text.txt"])
    vision, language = parsed(tmp_path, record, "--seed", "3", "--components", "vision=0.1,language=0.1")["config"]
    assert "seed" not in vision and vision["num_samples"] == 4


def test_a_plan_by_a_config_alone_is_of_no_component_of_a_record(tmp_path):
    """Two of them ended in a traceback, and of one the plan was that of the language model."""
    first, record = record_of(make_method("modegpt", sparsity=0.2)), record_of(make_method("modegpt", sparsity=0.4))
    first["plan"]["part"], record["plan"]["part"] = "vision", "language"
    for found, of in ((first, "vision"), (record | {"before": first}, "vision=0.2,language=0.4")):
        (tmp_path / "record.json").write_text(json.dumps(found))
        line = ["plan", "model", "--config", str(tmp_path / "record.json"), "--gpu", "80GB"]
        with pytest.raises(OptionError, match=f"--gpu plans .* and --config is of {of}; leave one of them out"):
            typer.main.get_command(app)(line, standalone_mode=False)


def wrong(key: str, value, *, method: bool = False) -> dict:
    record = record_of(make_method("modegpt"))
    (record["plan"]["method"] if method else record)[key] = value
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (wrong("sparsity", {"mlp": []}, method=True), "plan.method.sparsity should be a number"),
        (wrong("sparsity", 1.5, method=True), "sparsity must be in"),
        (wrong("method", "modgpt", method=True), "did you mean 'modegpt'"),
        (wrong("selcetion", "leverage", method=True), "did you mean 'selection'"),
        (wrong("method", 3), "method should be a string"),
        (wrong("dtype", 3), "dtype should be a string"),
        (wrong("calibration", CALIBRATION | {"seed": "x"}), "seed should be a whole number"),
        (wrong("plan", {"kv_bytes_per_token": 1}), "plan lacks model, method, modules"),
        (wrong("plan", {"model": "m", "modules": [], "facts": {}, "method": {}} | PLANNED), "plan.method lacks method"),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path, record, said):
    with pytest.raises((OptionError, CheckpointError, UsageError)) as error:
        parsed(tmp_path, record)
    assert said in (error.value.format_message() if isinstance(error.value, UsageError) else str(error.value))


def test_a_comparison_gives_its_rows_and_its_measures(tmp_path):
    facts = config()
    facts["identity"] |= {"base_model": "owner/name", "revision": "abc", "calibration": CALIBRATION | {"field": "body"}}
    facts["identity"]["measures"] |= {"tasks": {"tasks": ["piqa", "copa"], "folder": "rows", "limit": None}}
    facts["runs"].append({"methods": ["svd"], "sparsities": [0.5]})
    params = parsed(tmp_path, facts, "-o", "again", command="compare")
    assert [(run["methods"], run["sparsities"]) for run in params["config"]] == [
        (",".join(METHODS), "0.1,0.3"),
        ("svd", "0.5"),
    ]
    assert params["text"] == [text["text"] for text in facts["identity"]["measures"]["texts"]]
    expected = {"text_length": 256, "limit": None, "tasks": "piqa,copa", "include_path": "rows", "speed": True}
    expected |= {"model": f"{facts['identity']['base_model']}@abc", "dtype": "float32", "text_column": "body"}
    assert {key: params[key] for key in expected} == expected
    assert group(CalibrationOptions, params) == CalibrationOptions(["a text.txt"], 4, 32, 1, "body")
    one = parsed(tmp_path, facts, "-o", "one", "--methods", "svd", "--limit", "3", command="compare")
    assert [run.get("methods") for run in one["config"]] == [None, None] and one["limit"] == 3
    first, *_ = texts = facts["identity"]["measures"]["texts"]
    texts[:] = [
        first | {"limit": 128},
        first | {"text": "b.txt", "limit": None},
    ]  # a protocol has a limit for the first
    assert parsed(tmp_path, facts, "-o", "again", command="compare")["limit"] is None
    del facts["identity"]["measures"]["tasks"]
    assert parsed(tmp_path, facts, "-o", "again", command="compare")["limit"] is None
    texts[1]["limit"] = 200
    assert parsed(tmp_path, facts, "-o", "again", command="compare")["limit"] == 200
    facts["identity"]["measures"]["generation"] = {"limit": 2, "kinds": ["last word"], "folder": "words"}
    written = parsed(tmp_path, facts, "-o", "again", command="compare")
    assert written["generation"] and written["include_path"] == "words"
