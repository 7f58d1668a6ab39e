"""Accuracy on question sets, by lm-eval (the extra ``rankfold[tasks]``): its definitions, scores, standard errors."""

import contextlib
import functools
import hashlib
import io
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .._utils.extras import require
from .._utils.processes import from_first, gather, process_count, process_index
from .._utils.progress import count_steps, without_bars
from .._utils.reporting import reporting
from .._utils.sizes import plural
from ..data.calibration_data import shown
from ..errors import CheckpointError, DataError, NumericsError, OptionError, option, suggestion
from .local_tasks import LOCAL, local_definitions, local_rows
from .science_qa import SCIENCE_QA, by_column
from .with_pictures import ask

log = logging.getLogger(__name__)

SEEN = "scienceqa"  # the task whose questions have pictures
OWN = (SEEN, "mmlu_math")  # that lm-eval does not have by these names
SEED = 1234  # of the examples; lm-eval's own
BOOTSTRAP = 1000  # draws for the error of what is no mean (perplexity of LAMBADA); 100,000 take minutes


@dataclass(frozen=True)
class Questions:
    """Tasks of lm-eval to run, and how.

    Args:
        tasks: lm-eval's names of tasks or groups, ``scienceqa``, and ``mmlu_math``; ``mmlu_math:5`` has 5 examples
            before each question, whatever ``num_fewshot`` says.
        folder: take the rows from files there instead of the hub; see :func:`~.local_tasks.local_rows`.
        limit: only the first questions of each.
        batch_size: questions' choices per forward; results agree up to rounding.
        num_fewshot: examples before each question; ``None``: what the task defines, mostly none.
    """

    tasks: Sequence[str]
    folder: str | None = None
    limit: int | None = None
    batch_size: int = 8
    num_fewshot: int | None = None

    @property
    def examples(self) -> dict[str, int | None]:
        """Name of every task -> examples before each of its questions; ``None``: what the task defines."""
        found = {}
        for task in self.tasks:
            name, colon, number = task.rpartition(":")
            counted = colon and number.isdecimal()
            found[name if counted else task] = int(number) if counted else self.num_fewshot
        return found

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded.

        Raises:
            OptionError: lm-eval is not installed, nothing to do, an unknown task (with a suggestion), one named twice,
                or a number out of range.
            DataError: local rows that are missing or of another kind.
        """
        require("lm_eval", option("tasks"))
        if not self.tasks or not all(self.tasks):
            raise OptionError(f"{option('tasks')} is empty or has an empty name; e.g. arc_easy,piqa,winogrande")
        found = [task if task in self.examples else task.rpartition(":")[0] for task in self.tasks]
        twice = [name for name in found if found.count(name) > 1]
        if twice:
            raise OptionError(f"{option('tasks')} names {twice[0]!r} more than once; name it once")
        for name, least in (("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{option(name)} must be >= {least}, got {value}")
        self._files()
        names = [*_manager(tuple(self.examples)).all_tasks, *OWN]
        for name in self.examples:
            if name not in names:
                raise OptionError(f"unknown task {name!r}; {suggestion(name, names)}`lm-eval ls tasks` lists them all")

    def _files(self) -> dict[str, dict[str, Path]]:
        """The local files of every task, whose rows are checked; none where they come from the hub."""
        if self.folder is None:
            return {}
        folder = Path(self.folder).expanduser()
        return {name: local_rows(name, folder, examples) for name, examples in self.examples.items()}

    def left_out(self) -> dict[str, str]:
        """Return why each task that cannot be run here cannot; the rows of all others are there.

        Raises:
            OptionError: lm-eval is not installed, an unknown task, or a number out of range.
        """
        found = {}
        for task in self.tasks:
            alone = replace(self, tasks=[task])
            try:
                alone.check()
                if self.folder is None:
                    with tempfile.TemporaryDirectory(prefix="rankfold-") as scratch, _silenced():
                        alone._load(Path(scratch))
            except (DataError, CheckpointError) as error:
                reason = str(error).replace(str(self.folder), shown(self.folder)) if self.folder else str(error)
                found[task] = reason.partition(";")[0]
        return found

    def digest(self) -> str:
        """Of the local files that the questions, and examples, are read from: 32 hexadecimal digits."""
        found = hashlib.sha256()
        for files in self._files().values():
            for file in files.values():
                found.update(hashlib.sha256(file.read_bytes()).digest())
        return found.hexdigest()[:32]

    def measure(
        self, network, tokenizer, *, autocast: torch.dtype | None = None, processor: Callable[[], Any] = lambda: None
    ) -> dict[str, dict]:
        """Run the tasks on a model in memory, dense or compressed.

        Args:
            network: a causal language model.
            tokenizer: the model's.
            autocast: run the forward under autocast in this dtype.
            processor: loads that of the model; called where a model of images and text is asked ``scienceqa``, with the
                pictures (:func:`~.with_pictures.ask`).

        Returns:
            task -> ``{metric, metric + "_stderr", ..., "samples", "num_fewshot", "version"}``, as lm-eval computes
            them; ``scienceqa`` also has ``columns`` (:func:`~.science_qa.by_column`). Groups hold their own means.

        Raises:
            OptionError, DataError: see :meth:`check`; or examples before a question that has a picture.
            CheckpointError: the hub cannot be reached.
            NumericsError: a score is not a number.
        """
        self.check()
        takes_pictures = getattr(network.config, "image_token_id", None) is not None
        loaded = processor() if takes_pictures and SEEN in self.examples else None
        if loaded is None:
            return self._by_lm_eval(network, tokenizer, autocast)
        if self.examples[SEEN]:
            raise OptionError(
                f"a model of images and text is asked {SEEN} without examples; leave out {option('num_fewshot')} and "
                f"{SEEN}:{self.examples[SEEN]}"
            )
        others = replace(self, tasks=[task for task in self.tasks if task.partition(":")[0] != SEEN])
        found = others._by_lm_eval(network, tokenizer, autocast) if others.tasks else {}
        file = self._files().get(SEEN, {}).get("test")
        seen = from_first(lambda: ask(network, loaded, file, limit=self.limit, batch_size=self.batch_size))
        return found | {SEEN: seen}

    def _by_lm_eval(self, network, tokenizer, autocast: torch.dtype | None) -> dict[str, dict]:
        import lm_eval

        with tempfile.TemporaryDirectory(prefix="rankfold-") as scratch, _silenced():
            loaded = self._load(Path(scratch))
            if process_count() > 1 and not self._can_be_shared(loaded):
                return from_first(lambda: self._by_lm_eval(network, tokenizer, autocast))
            for name, examples in self.examples.items():
                for task in self._leaves(loaded, name):
                    _set_examples(task, examples)
            scorer = _scorer(network, tokenizer, self.batch_size, autocast, ", ".join(self.examples))
            samples = "scienceqa" in loaded["tasks"]
            result: Any = lm_eval.evaluate(
                scorer, loaded, limit=self.limit, bootstrap_iters=BOOTSTRAP, log_samples=samples
            )
            cut = sum(gather(scorer.cut), Counter())
            found = from_first(lambda: self._found(result, cut))  # of which lm-eval tells the first process only
        if cut:
            log.warning(
                "the model takes %d tokens: the beginning was cut off from %s (%s), which are longer with an answer",
                scorer.max_length,
                plural(cut.total(), "prompt"),
                ", ".join(cut),
            )
        return found

    def _can_be_shared(self, loaded) -> bool:
        """Tell whether each process has a question of every task, as lm-eval wants it."""
        tasks = (task for name in self.examples for task in self._leaves(loaded, name))
        return all(min(len(task.eval_docs), self.limit or sys.maxsize) >= process_count() for task in tasks)

    def _found(self, result: dict, cut: Counter[str]) -> dict[str, dict]:
        """Return what lm-eval computed, by task."""
        parts = {part for name in self.examples if name in OWN for part in LOCAL[name].parts}
        found = {name: _plain(name, result, cut) for name in result["results"] if name not in parts}
        if "scienceqa" in found:
            found["scienceqa"]["columns"] = by_column(result["samples"]["scienceqa"])
        return found

    def _load(self, scratch: Path) -> Any:
        """lm-eval's task objects, rows included."""
        manager, files = _manager(tuple(self.examples)), self._files()
        others = [name for name in self.examples if name not in LOCAL]
        advice = (
            f"without the hub, only {', '.join(sorted(LOCAL))} can be asked, from rows in a folder "
            f"({option('include_path')})"
            if others
            else f"without the hub, put their rows into a folder and name it by {option('include_path')}"
        )
        with reporting(CheckpointError, f"the questions of {', '.join(self.examples)} cannot be read", advice):
            chosen: list[Any] = []
            for name in self.examples:
                parts = LOCAL[name].parts if name in OWN else ()
                if name in files:
                    found = local_definitions(name, files[name], manager.task_index, scratch)
                else:
                    found = [SCIENCE_QA] if name == "scienceqa" else [*(parts or (name,))]
                chosen += [_group(name, manager.load(found))] if parts else found
            return manager.load(chosen)

    def _leaves(self, loaded, name: str) -> list:
        """Return lm-eval's task of a name, or those of a group or a tag."""
        if name in loaded.get("groups", {}):
            return loaded["groups"][name].get_all_tasks()
        entry = _manager(tuple(self.examples)).task_index.get(name)
        names = sorted(entry.tags or ()) if entry and name not in loaded["tasks"] else [name]
        return [loaded["tasks"][leaf] for leaf in names]


@functools.lru_cache(maxsize=1)
def _manager(tasks: tuple[str, ...]):
    """lm-eval's index; all of it takes many seconds to read, so only folders of well-known tasks where that will do."""
    import lm_eval.tasks

    if not set(tasks) <= set(LOCAL):
        return lm_eval.tasks.TaskManager()
    root = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = sorted({root / LOCAL[name].folder for name in tasks if LOCAL[name].folder})
    return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)


def _group(name: str, loaded: Any):
    """Return a group of lm-eval's tasks, whose accuracy is that of all their questions together."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    mean: Any = [{"metric": "acc", "weight_by_size": True}]
    group = Group.from_config(GroupConfig(group=name, aggregate_metric_list=mean, metadata={"version": 1}))
    for task in loaded["tasks"].values():
        group.add(task)
    return group


def _set_examples(task, num_fewshot: int | None) -> None:
    """As ``lm_eval.simple_evaluate`` does: a task that fixes none keeps none."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=SEED)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep lm-eval's lines and bars away; what stops it is raised."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), without_bars():
            yield
    finally:
        log.setLevel(before)


def _scorer(network, tokenizer, batch_size: int, autocast: torch.dtype | None, tasks: str):
    from lm_eval.models.huggingface import HFLM

    base: Any = HFLM  # which hides its arguments from type checkers

    class Scorer(base):
        """lm-eval's own, but it shows how far it is, counts what it cuts, and a score that is no number stops it: it
        would count as a wrong answer, or as a right one. Processes share the questions."""

        def __init__(self, **options):
            super().__init__(**options)
            self.asked: list[str] = []  # the task of every request
            self.cut: Counter[str] = Counter()  # task -> prompts that are longer than the model's context
            self._rank, self._world_size = process_index(), process_count()

        def all_gather(self, tensor):
            """What lm-eval asks to give all processes equally many questions, which ours need not have."""
            return tensor.expand(self.world_size)

        def gather_object(self, obj, dst=0):
            """The numbers of all questions in their order, as of one process: errors are drawn by it."""
            return [_in_turn(gather(obj))]

        def barrier(self):
            pass

        def loglikelihood(self, requests, *args, **options):
            self.asked = [request.task_name for request in requests]
            with self._counted(requests):
                scores = super().loglikelihood(requests, *args, **options)
            if not all(math.isfinite(score) for score, _ in scores):
                raise NumericsError("the model's score of an answer is NaN or infinite; check the checkpoint or dtype")
            return scores

        def _loglikelihood_tokens(self, requests, *args, **options):
            longest = self.max_length + 1  # the last token is only predicted
            asked = zip(self.asked, requests, strict=False)  # a rolling likelihood asks for windows, of no task
            self.cut.update(task for task, (_, context, answer) in asked if len(context) + len(answer) > longest)
            return super()._loglikelihood_tokens(requests, *args, **options)

        def loglikelihood_rolling(self, requests, *args, **options):
            self.asked = []
            with self._counted(requests):
                return super().loglikelihood_rolling(requests, *args, **options)

        def generate_until(self, requests, *args, **options):
            with self._counted(requests):
                return super().generate_until(requests, *args, **options)

        @contextlib.contextmanager
        def _counted(self, requests):
            """lm-eval tells a cache of every answer; ours counts them."""
            with count_steps(f"answering {tasks}", len(requests)) as advance:
                hook: Any = SimpleNamespace(add_partial=lambda *_: advance())
                self.set_cache_hook(hook)
                yield

    return Scorer(
        pretrained=network,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        mixed_precision_dtype=autocast,
    )


def _in_turn(found: list[Any]) -> Any:
    """Return one list out of those of all processes, which take questions in turn; of dicts, under every key."""
    if isinstance(found[0], dict):
        return {key: _in_turn([one[key] for one in found]) for key in found[0]}
    return [found[place % len(found)][place // len(found)] for place in range(sum(map(len, found)))]


def _plain(name: str, result: dict, cut: Counter[str]) -> dict:
    """lm-eval's ``{"acc,none": 0.5, "acc_stderr,none": 0.1}`` as ``{"acc": 0.5, "acc_stderr": 0.1}``, with the name of
    a filter after that of the metric, the number of questions, and how many prompts were cut, if any."""
    facts = {}
    for key, value in result["results"][name].items():
        metric, comma, filtered = key.partition(",")
        if not comma:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise NumericsError(f"{metric} of {name} is {value}; check the checkpoint or dtype")
        if filtered != "none":  # the error of `exact_match,strict-match` is called like that of any other metric
            error = "_stderr" * metric.endswith("_stderr")
            metric = f"{metric.removesuffix('_stderr')},{filtered}{error}"
        facts[metric] = None if value == "N/A" else value
    asked = Counter({task: numbers["effective"] for task, numbers in result["n-samples"].items()})
    facts["samples"] = _of_leaves(name, asked, result["group_subtasks"])
    if truncated := _of_leaves(name, cut, result["group_subtasks"]):
        facts["truncated"] = truncated
    return facts | {"num_fewshot": result["n-shot"].get(name), "version": result["versions"].get(name)}


def _of_leaves(name: str, counts: Counter[str], members: dict[str, list[str]]) -> int:
    """Sum counts of tasks over those of a group, and of its groups."""
    return counts[name] + sum(_of_leaves(member, counts, members) for member in members.get(name, []))
