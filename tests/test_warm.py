"""Processes that are forked are as new ones, but for what they have imported."""

from warm import TORCH, python

LOADED = "import sys; print(*(name in sys.modules for name in ('torch', 'transformers', 'rankfold')))"


def test_it_has_torch_and_transformers_and_nothing_that_knows_rankfold():
    for options, expected in (({}, "True True False\n"), ({"forked_from": TORCH}, "True False False\n")):
        done = python(LOADED, **options)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_how_it_ends_and_what_it_prints_is_handed_on(tmp_path):
    code = "import os, sys; print(os.getcwd(), sys.argv[1:], os.environ['A']); print('x', file=sys.stderr); sys.exit(3)"
    done = python(code, "b c", cwd=tmp_path, env={"A": "d"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{tmp_path} ['b c'] d\n", "x\n")
    failed = python("1 / 0")
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
