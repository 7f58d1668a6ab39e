"""Whatever the command line: one line on stderr and exit code 2, and what is printed is what was meant."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankfold.cli import main
from saved import save_text, save_tiny
from warm import RANKFOLD, start

CALIBRATION = "--calibration text.txt --num-samples 4 --max-length 32 --rank-multiple 2 --device cpu"
WITHOUT_TEXT = "--rank-multiple 2 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    (folder / "plan.json").write_text("mine")
    return folder


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Run arguments in the folder; (exit code, stdout, stderr)."""

    def call(*arguments: str):
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["rankfold", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return call


def outside(place: Path, line: str, **options) -> subprocess.CompletedProcess:
    """The command in a process of its own, under a shell."""
    return subprocess.run(
        f"{sys.executable} -m rankfold {line}", shell=True, cwd=place, capture_output=True, text=True, **options
    )


COMPARED = "compare model -o x --methods modegpt --sparsities 0.3"
BAD = [
    ("nonsense", "No such command 'nonsense'; see `rankfold --help`"),
    ("compress", "Missing argument 'model'; see `rankfold compress --help`"),
    ("compress model -o x --sparsty 0.3", "No such option: --sparsty"),
    ("compress model -o x --sparsity 30%", "'--sparsity': Input should be a valid number, got '30%'; see"),
    ("compress model -o x --num-samples 4 --num-samples 8", "--num-samples is given 2 times; give it once"),
    ("compress model -o x --sparsity nan", "--sparsity must be a finite number, got nan"),
    (
        "compress model -o x --method modegpt --allocation influence:temperature=nan",
        "temperature of allocation influence must be a finite number, got nan",
    ),
    (
        "compress model -o x --allocation owl:spred=0.1",
        "unknown option of allocation owl 'spred'; did you mean 'spread'? available: threshold, spread",
    ),
    ("compress model -o x --seed 18446744073709551617", "--seed must fit into 64 bits, got 18446744073709551617"),
    ("compress model -o x --seed " + "9" * 400, "--seed must fit into 64 bits, got 9999"),
    ("compress ~nouser/x -o x", "MODEL: there is no user whose home is '~nouser'; write the path out"),
    (
        "compress model -o x --calibration self --calibration ptb:~nouser/x=2",
        "--calibration: there is no user whose home",
    ),
    ("evaluate model --text ptb:~nouser/x", "--text: there is no user whose home is '~nouser'"),
    ("recover model -o x --teacher ~nouser/x", "--teacher: there is no user whose home is '~nouser'"),
    ("compress model --output=~nouser/x", "--output: there is no user whose home is '~nouser'"),
    ("compress model -o x --set sparsity=0.9", "'sparsity' is an option of every method: give it as --sparsity"),
    ("compress model -o x --set ridge=nan", "--set 'ridge=nan': expected a finite number"),
    ("compress model -o x --set ridge=1 --set ridge=2", "--set gives 'ridge' more than once; give it once"),
    (
        "compress model -o x --method latentllm --set rounds=1.5",
        "--set 'rounds=1.5': expected a finite whole number",
    ),
    ("compress model -o x --modules mlp=0.2,mlp=0.5", "--modules names 'mlp' more than once; name it once"),
    ("compress model -o x --modules qk,qk", "--modules names 'qk' more than once; name it once"),
    ("compress model -o x --modules mlp=0.2,qk", "--modules takes mlp,qk,vo or"),
    (
        "compress model -o x --moments m --mode sequential",
        "--moments is one pass over text that is measured already, --mode",
    ),
    ("plan model --moments m --seed 0", "--seed would be ignored; leave one of them out"),
    ("plan model -o plan.json", "plan.json exists already; choose another name or remove it"),
    ("plan model -o nowhere/plan.json", "nowhere is not a folder; make it first"),
    ("compress model -o " + "x" * 300, "File name too long; choose another folder"),
    # Python 3.14 says of a name that no file can have that there is none.
    ("inspect " + "x" * 300, "there is no folder" if sys.version_info >= (3, 14) else "File name too long"),
    ("compress model -o x\udce9", r"the name 'x\udce9' is not UTF-8; choose another one"),
    ("calibrate model -o x\udce9 --calibration text.txt", r"the name 'x\udce9' is not UTF-8; choose another one"),
    (
        "compress model -o x --sparsity 0.5 --modules mlp=0.2",
        "--sparsity would be ignored, it goes with modules that",
    ),
    ("plan model --sparsity 0.5 --target-size 1MB", "--sparsity would be ignored; leave one of them out"),
    ("plan model --target-size 1MB --budget flops", "--budget would be ignored; leave one of them out"),
    ("compress model --keep-quality 0.9 --sparsity 0.5", "--sparsity cannot be given with it; leave one out"),
    ("compress model --target-size 1MB --keep-quality 0.9", "--keep-quality would be ignored; leave one of them out"),
    ("plan model --target-size much", "--target-size takes a size above 0, such as 400MB or 1.5GiB"),
    ("plan model --calibration text.txt --keep-quality 1.5", "--keep-quality must be in (0, 1), got 1.5"),
    ("compress model --keep-quality 1.5", "--keep-quality must be in (0, 1), got 1.5"),  # before a text is fetched
    ("plan model --budget parameters:context=64", "unknown option of budget parameters 'context'"),
    ("plan model --allocation uniform:temperature=0.1", "unknown option of allocation uniform 'temperature'"),
    (
        "plan model --method modegpt --target stock --allocation influence:temperature=1",
        "gives all MLPs one width, got allocation influence:temperature=1.0; take allocation uniform",
    ),
    ("plan model --allocation owl:spread=wide", "spread of allocation owl must be a number, got 'wide'"),
    ("plan model --allocation owl:spread=0.1,spread=0.2", "allocation owl gives 'spread' more than once; give it once"),
    (
        "plan model --method shortgpt --rank-multiple 4",
        "--rank-multiple would be ignored, it goes with methods that make layers",
    ),
    (
        "plan model --method wanda --rank-multiple 4",
        "--rank-multiple would be ignored, it goes with methods that make layers",
    ),
    (
        "plan model --calibration text.txt --text-column body",
        "--text-column body would be ignored, of text.txt; it is of files with rows",
    ),
    (
        "plan model --calibration a.txt=1 --calibration ptb=2 --text-column body",
        "--text-column body would be ignored, of a.txt=1 and",
    ),
    (
        "plan model --calibration rows.jsonl=0.5 --calibration text.txt --text-column body",
        "takes a share for every text or",
    ),
    (f"{COMPARED} --text text.txt --text-column body --calibration nowhere.jsonl", "no text at 'nowhere.jsonl'"),
    ("plan model --calibration wikitxt2", "no text at 'wikitxt2': did you mean 'wikitext2'? expected"),
    (
        "evaluate model --text text.txt --text-column body",
        "--text-column body would be ignored, of text.txt; it is of files with rows",
    ),
    ("evaluate model --text text.txt --batch-sizes 1", "--batch-sizes would be ignored without --speed; give both or"),
    ("evaluate model --text text.txt --batch-size 1", "--batch-size would be ignored without --tasks; give both or"),
    (
        "evaluate model --speed --limit 1",
        "--limit would be ignored without --text or --tasks or --generation; give both",
    ),
    ("evaluate model --generation --limit 0", "--limit must be >= 1, got 0"),
    ("evaluate model --speed --max-length 64", "--max-length would be ignored without --text; give both or neither"),
    ("inspect no\nsuch", r"rankfold: there is no folder no\nsuch"),
]
COMPARE = "compare model -o x --text text.txt --methods"
BAD += [
    (f"{COMPARE} modgpt --sparsities 0.3", "unknown method 'modgpt'; did you mean 'modegpt'"),
    (f"{COMPARE} modegpt:selct=norm --sparsities 0.3", "unknown modegpt option 'selct'; did you mean 'selection'"),
    (
        f"{COMPARE} modegpt --sparsities 0.3,1.5",
        "--sparsities takes numbers in (0, 1) such as 0.1,0.3,0.5; got '0.3,1.5'",
    ),
    (
        f"{COMPARE} modegpt:allocation=owl:outlier=3 --sparsities 0.3",
        "unknown option of allocation owl 'outlier'; available: threshold, spread",
    ),
    (f"{COMPARE} modegpt,modegpt --sparsities 0.3", "is the same as modegpt at 0.3; give it once"),
    (f"{COMPARE} modegpt --sparsities 0.3 --include-path x", "--include-path would be ignored without --tasks"),
    (f"{COMPARE} modegpt --sparsities 0.3 --limit 0", "limit must be >= 1, got 0"),
    (f"{COMPARE} modegpt --sparsities 0.3 --text text.txt", "--text names 'text.txt' more than once; name it once"),
    (f"{COMPARE} modegpt --sparsities 0.3 --text nowhere.txt", "no text at 'nowhere.txt'"),
    (
        f"{COMPARE} latentllm:joint=ud --sparsities 0.3 {CALIBRATION.replace('--rank-multiple 2 ', '')}",
        "cannot take the joint form",
    ),
    ("compare model --methods svd --sparsities 0.3 --text text.txt", "Missing option '-o' / '--output'"),
]
BAD += [
    (f"compress model -o x --moments m --{name} {value}", f"--{name} would be ignored; leave one of them out")
    for name, value in {
        "calibration": "ptb",
        "num-samples": 8,
        "max-length": 8,
        "seed": 1,
        "text-column": "body",
    }.items()
]


@pytest.mark.parametrize("line, message", BAD, ids=[line[:60] for line, _ in BAD])
def test_a_bad_command_line_is_one_line_and_exit_code_2(run, place, line, message):
    before = sorted(place.iterdir())
    code, out, err = run(*line.split(" "))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("rankfold: ") and message in err
    assert sorted(place.iterdir()) == before and (place / "plan.json").read_text() == "mine"


def test_what_is_written_may_be_in_the_home(run, place, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    asked = ["--method=modegpt", "--calibration", "text.txt", "--num-samples", "2", "--max-length", "32"]
    code, _, err = run("plan", "model", *asked, "--output=~/plan.json")  # no shell replaces it there
    assert code in (0, None), err
    assert (tmp_path / "plan.json").is_file() and not (place / "~").exists()


def test_nothing_gives_the_help(run):
    code, out, err = run()
    assert (code, err) == (0, "") and "compress" in out


def test_one_pass_goes_with_moments(run, place):
    code, _, err = run(*f"calibrate model -o one-pass {CALIBRATION.replace('--rank-multiple 2', '')}".split())
    assert code == 0, err
    code, _, err = run(
        *f"compress model -o of-moments --method modegpt --moments one-pass --mode one-pass {WITHOUT_TEXT}".split()
    )
    assert code == 0, err


def test_calibrating_again_repairs_what_is_damaged(run, place):
    line = f"calibrate model -o repaired {CALIBRATION.replace('--rank-multiple 2', '')}".split()
    assert run(*line)[0] == 0
    whole = {path.name: path.read_bytes() for path in (place / "repaired").iterdir()}
    block = place / "repaired" / "block-00001.safetensors"
    block.write_bytes(block.read_bytes()[:-8] + b"damaged!")
    compress = f"compress model -o from-repaired --method modegpt --moments repaired {WITHOUT_TEXT}".split()
    code, _, err = run(*compress)
    assert code == 2 and "block-00001.safetensors is missing or damaged" in err.splitlines()[-1]
    assert run(*line)[0] == 0
    assert {path.name: path.read_bytes() for path in (place / "repaired").iterdir()} == whole
    code, _, err = run(*compress)
    assert code == 0, err


def test_names_with_brackets_and_long_paths_are_printed_as_they_are(run, place):
    name = "[bold]:smile:" + "long" * 30
    code, out, err = run(*f"compress model -o {name} {CALIBRATION}".split())
    assert code == 0 and f"{name}: " in out, err
    code, out, _ = run("inspect", name)
    assert code == 0 and "compressed by rankfold" in out
    code, _, err = run("inspect", "[red]nothing")
    assert code == 2 and "there is no folder [red]nothing" in err


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r.pop("counts"), "rankfold.json is damaged: it lacks counts; copy or make it again"),
        (lambda r: r["counts"].pop("bytes"), "counts lacks bytes"),
        (lambda r: r.update(calibration=[]), "calibration should be an object, got '[]'"),
        (lambda r: r["blocks"]["0"]["mlp"].update(rank="x"), "blocks.0.mlp.rank should be a whole number, got 'x'"),
        (lambda r: r["held_out"].pop("ratio"), "held_out lacks ratio"),
        (lambda r: r.update(held_out="x"), "held_out should be an object, got 'x'"),
    ],
)
def test_a_damaged_record_is_named(run, place, change, message):
    if not (place / "small").exists():
        assert run(*f"compress model -o small {CALIBRATION}".split())[0] == 0
    record = json.loads((place / "small" / "rankfold.json").read_text())
    change(record)
    (place / "damaged").mkdir(exist_ok=True)
    (place / "damaged" / "rankfold.json").write_text(json.dumps(record))
    code, out, err = run("inspect", "damaged")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_an_interrupt_says_how_to_go_on(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("rankfold.pipeline.compress", interrupt)
    code, _, err = run(*f"compress model -o x2 {CALIBRATION}".split())
    assert code == 130
    assert err.splitlines()[-1] == "rankfold: interrupted; an unfinished run continues when it is started again"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_real_interrupt_says_how_to_go_on(place, tmp_path):
    line = (
        f"compress model -o interrupted --calibration pydoc --num-samples 4000 --max-length 128 {WITHOUT_TEXT}".split()
    )
    listening = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {RANKFOLD}"
    process = start(listening, *line, cwd=place, err=tmp_path / "err")  # a shell's background jobs ignore the signal
    while process.is_alive() and not (place / "interrupted.partial").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    err = (tmp_path / "err").read_text()
    assert process.exitcode == 130, err
    assert err.splitlines()[-1] == "rankfold: interrupted; an unfinished run continues when it is started again"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=str)
def test_too_little_memory_is_one_line(run, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("rankfold.pipeline.compress", full)
    code, _, err = run(*f"compress model -o x2 {CALIBRATION}".split())
    assert code == 2 and err.splitlines()[-1].startswith("rankfold: out of memory; give fewer or shorter samples")


def test_a_bug_shows_its_traceback(place, monkeypatch):
    def bug(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("rankfold.pipeline.compress", bug)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["rankfold", "compress", "model", "-o", "x2", *CALIBRATION.split()])
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_where_nothing_can_be_printed(place):
    full = outside(place, "methods > /dev/full")
    assert full.returncode == 2
    assert (
        full.stderr
        == "rankfold: cannot use a file: No space left on device; check the name, its permissions and the disk\n"
    )
    assert outside(place, "methods >&- 2>&- <&-").returncode == 0
    assert outside(place, "methods nope 2> /dev/full").returncode == 2


def test_a_chat_that_nobody_can_type_in_ends(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # closed by the shell
    code, _, err = run("chat", "model")
    assert code in (0, None), err


@pytest.mark.parametrize("line", ["methods", "compress --help", "nonsense 2>&1"])  # by rich, by typer, and an error
def test_where_nobody_reads_what_is_printed(place, line):
    """Quiet, and the exit code that a shell has of other commands there; 1 would mean a failed row of `compare`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            f"{sys.executable} -m rankfold {line}", shell=True, cwd=place, stdout=writing, stderr=subprocess.PIPE
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_closed_folder_is_one_line(run, place):
    (place / "closed").mkdir(mode=0)
    for line in ("inspect closed", "compress model -o closed/x", "calibrate model -o closed/x --calibration text.txt"):
        code, _, err = run(*line.split())
        assert code == 2 and "Permission denied" in err and err.count("\n") == 1
