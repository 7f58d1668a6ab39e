"""What starts quickly: the import, and the commands that only print; and what transformers knows after the import."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rankfold
from rankfold.methods import METHODS, method_class, method_names
from saved import save_tiny
from warm import TORCH
from warm import python as forked

python_with_torch = partial(forked, forked_from=TORCH)
HEAVY = ("torch", "transformers", "datasets", "gguf", "accelerate", "numpy", "pydantic", "rich")
PRINTING = ("--help", "--version", "compress --help", "compare --help", "models --help", "methods")


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_brings_nothing_heavy():
    code = f"import rankfold, sys; rankfold.method_names(); print([n for n in {HEAVY} if n in sys.modules])"
    assert python(code).strip() == "[]"


@pytest.mark.parametrize("line", PRINTING)
def test_commands_that_only_print_bring_nothing_heavy(line):
    code = f"""
import sys
from rankfold.cli import main
sys.argv = ["rankfold", *{line.split()}]
try:
    main()
except SystemExit as stop:
    print("\\nLOADED", stop.code, [n for n in {HEAVY} if n in sys.modules])
"""
    drawn_by = ["pydantic", "rich"] if line == "methods" else []
    assert python(code).splitlines()[-1] == f"LOADED 0 {drawn_by}"


@pytest.mark.parametrize(
    "line, offered",
    [
        ("com", ["compress", "compare"]),
        ("compress x --keep-quality 0.9 --sparsity 0.3 --me", ["--method"]),  # two that exclude each other
        ("plan x --sparsity 0.3 --sparsity 0.4 --method latent", ["latentllm"]),
        ("methods svd", ["svd", "svd-llm"]),
    ],
)
def test_a_line_is_completed_at_once_whatever_stands_in_it(line, offered):
    words = {
        "COMP_WORDS": f"rankfold {line}",
        "COMP_CWORD": str(len(line.split())),
        "_RANKFOLD_COMPLETE": "complete_bash",
    }
    code = f"""
import os, sys
os.environ |= {words}
sys.argv = ["rankfold"]
from rankfold.cli import main
try:
    main()
except SystemExit as stop:
    print("\\nLOADED", stop.code, [n for n in {HEAVY} if n in sys.modules])
"""
    *found, _, loaded = python(code).splitlines()
    assert (found, loaded) == (offered, "LOADED 0 []")


def test_every_public_name_is_there_and_no_module_hides_one():
    code = """
import importlib, pkgutil, rankfold
for module in pkgutil.iter_modules(rankfold.__path__):
    assert module.name not in rankfold.__all__, module.name
for name in rankfold.__all__:
    assert name in dir(rankfold)
    getattr(rankfold, name)
"""
    done = python_with_torch(code)
    assert done.returncode == 0, done.stderr


def test_neither_gguf_nor_datasets_is_needed(tmp_path):
    """For a folder of safetensors and texts that the caller holds."""
    code = """
import sys
sys.modules |= dict.fromkeys(("gguf", "datasets"))  # importing them is an error
import rankfold
for name in rankfold.__all__:
    getattr(rankfold, name)
texts = [f"The number {i} comes after {i - 1} and before {i + 1}, as everybody knows." for i in range(200)]
sizes = {"num_samples": 8, "max_length": 16, "rank_multiple": 2}
model, output = sys.argv[1:]
rankfold.compress(model, 0.3, method="modegpt", calibration=texts, output=output, device="cpu", **sizes)
"""
    done = python_with_torch(code, str(save_tiny(tmp_path / "model", blocks=2)), str(tmp_path / "small"))
    assert done.returncode == 0 and (tmp_path / "small" / "rankfold.json").exists(), done.stderr


def test_without_gguf_a_file_of_it_is_refused_with_what_to_install(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code = """
import sys
sys.modules["gguf"] = None
from rankfold.cli import main
main()
"""
    for line in ("plan model.gguf --sparsity 0.3", "generate model.gguf hello"):
        done = python_with_torch(code, *line.split(), cwd=tmp_path)
        said = "rankfold: a .gguf file needs gguf, which is not installed; pip install 'rankfold[gguf]'"
        assert (done.returncode, done.stdout, done.stderr.strip().splitlines()[-1]) == (2, "", said)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rankfold' has no attribute 'shrink'"):
        _ = rankfold.shrink


@pytest.mark.parametrize("name", method_names())
def test_the_table_of_methods_leads_to_each(name):
    assert method_class(name).name == name
    assert len(METHODS[name].summary) <= 80


def test_every_method_is_in_the_table():
    """A class that names itself and is not abstract can be chosen by that name."""
    from rankfold.methods import Method

    def below(cls):
        return {cls, *(c for sub in cls.__subclasses__() for c in below(sub))}

    for name in method_names():
        method_class(name)
    named = {c.name for c in below(Method) if "name" in vars(c) and c.__module__.startswith("rankfold.methods.")}
    assert named <= set(method_names())


LOADS = """
import sys
{first}
from pathlib import Path
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(p.numel() for p in model.parameters()), type(model.model.layers[0].self_attn).__name__)
built = transformers.AutoModelForCausalLM.from_config(model.config)
print(type(built.model.layers[0].self_attn).__name__)
"""
FIRSTS = (
    "import rankfold, transformers",
    "import transformers, rankfold",
    "import transformers; transformers.AutoModelForCausalLM; import rankfold",
    "import rankfold; from transformers.models.llama import modeling_llama; import transformers",
    "import rankfold; import transformers.modeling_layers; import transformers",
    "import rankfold; import transformers.quantizers; import transformers",
    "import rankfold; import rankfold.modules; import transformers",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    import torch

    from saved import save_tiny

    folder = tmp_path_factory.mktemp("small")
    save_tiny(folder / "model", blocks=2)
    source = rankfold.open_model(folder / "model", device="cpu")
    ids = torch.randint(0, 100, (8, 32), generator=torch.Generator().manual_seed(0))
    rankfold.compress(
        source,
        method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2),
        calibration=rankfold.CalibrationData(ids, "random", "test", 0),
        output=folder / "small",
    )
    return folder / "small"


@pytest.mark.parametrize("first", FIRSTS)
def test_transformers_loads_a_compressed_checkpoint_whatever_was_imported_first(small, first):
    done = python_with_torch(LOADS.format(first=first), str(small))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["CompressedAttention", "CompressedAttention"]


@pytest.mark.parametrize("first", FIRSTS[:3])
def test_what_a_config_says_of_quantisation_is_known_before_any_model(small, first):
    """lm-eval asks for it where it is given the name of a model."""
    code = f"""
import sys
{first}
config = transformers.AutoConfig.from_pretrained(sys.argv[1]).quantization_config
print(type(transformers.quantizers.AutoQuantizationConfig.from_dict(config)).__name__)
"""
    done = python_with_torch(code, str(small))
    assert (done.returncode, done.stdout) == (0, "RankfoldConfig\n"), done.stderr


def test_a_config_alone_is_built_as_it_describes(small):
    """`from_config` is the first call of the process."""
    code = """
import sys, rankfold, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
print(type(transformers.AutoModelForCausalLM.from_config(config).model.layers[0].self_attn).__name__)
"""
    done = python_with_torch(code, str(small))
    assert (done.returncode, done.stdout) == (0, "CompressedAttention\n"), done.stderr


@pytest.mark.parametrize("module", ["rankfold.cli.app", "torch", "rankfold.pipeline"])
def test_an_interrupt_during_the_imports_is_one_line_even_where_the_import_swallows_it(module):
    code = f"""
import contextlib, signal, sys
from rankfold.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            with contextlib.suppress(KeyboardInterrupt):  # NumPy's turns it into a RecursionError
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["rankfold", "compress", "nowhere", "-o", "out"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "rankfold: interrupted; an unfinished run continues when it is started again\n"


@pytest.mark.parametrize("where", ["object.__del__", "weakref.finalize"])
def test_an_interrupt_while_something_is_freed_is_not_lost(where):
    """Python only prints what is raised there, and goes on."""
    code = f"""
import signal, sys, weakref
import rankfold.cli.app
from rankfold.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)

class Freed:
    def __del__(self):
        if {where!r} == "object.__del__":
            signal.raise_signal(signal.SIGINT)

def free(*arguments, **options):
    freed = Freed()
    if {where!r} == "weakref.finalize":
        weakref.finalize(freed, signal.raise_signal, signal.SIGINT)
    del freed
    print("went on")

rankfold.cli.app.app = free
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "rankfold: interrupted; an unfinished run continues when it is started again\n"
