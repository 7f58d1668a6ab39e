"""What an experiment measures of every model: functions of a model and of the dense one that return facts of its row.

``describe()`` is what the numbers depend on; it goes into the configuration of the record.
"""

import math
import tempfile
from importlib import metadata
from pathlib import Path

from torch import Tensor, nn

import common
from rankfold import DenseModel, perplexity, save
from rankfold.comparison import Speed
from rankfold.errors import NumericsError, UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes
from rankfold.evaluation.generation import continue_text
from rankfold.evaluation.local_tasks import local_rows
from rankfold.evaluation.tasks import Questions
from rankfold.exports import export


class Perplexities:
    """Perplexity on one text, or by text on several; a loss beyond floating point is a result too.

    Args:
        windows: name -> ``(W, T)``; under the empty name where there is one text.
        names: name -> how a record calls the text.
    """

    def __init__(self, windows: dict[str, Tensor], names: dict[str, str], autocast):
        self.windows, self.names, self.autocast = windows, names, autocast

    def describe(self) -> dict:
        found = {name: common.describe_tokens(some, self.names[name]) for name, some in self.windows.items()}
        return {"evaluation": found.get("", found)}

    def __call__(self, model: nn.Module, dense) -> dict:
        try:
            found = {name: perplexity(model, some, autocast=self.autocast) for name, some in self.windows.items()}
        except NumericsError as error:
            return {"perplexity": None, "nll": None, "error": str(error)}
        if "" in found:
            return {key: found[""][key] for key in ("perplexity", "nll")}
        return {"perplexity": {name: one["perplexity"] for name, one in found.items()}}


class Accuracies:
    """Zero-shot accuracy by lm-eval on local rows, and its mean over the tasks."""

    def __init__(self, source: DenseModel, files, how: dict):
        self.source, self.how = source, how
        self.folder = common.data_file(files.data, "tasks/piqa_val.jsonl").parent

    def describe(self) -> dict:
        files = {name: local_rows(name, self.folder, None)["test"].name for name in self.how["tasks"]}
        return {"tasks": files, "limit": self.how["limit"], "lm_eval": metadata.version("lm_eval")}

    def __call__(self, model: nn.Module, dense) -> dict:
        questions = Questions(folder=str(self.folder), **self.how)
        found = questions.measure(model, self.source.tokenizer, autocast=self.source.autocast)
        mean = sum(task["acc"] for task in found.values()) / len(found)
        spread = math.hypot(*(task["acc_stderr"] for task in found.values())) / len(found)
        return {"tasks": found, "mean": mean, "mean_stderr": spread}


class Speeds:
    """Tokens per second in turns with the dense model; see :class:`rankfold.comparison.Speed`."""

    def __init__(self, source: DenseModel, files, how: dict):
        self.speed = Speed(source.context_length, **how)

    def describe(self) -> dict:
        return {"speed": self.speed.describe()}

    def __call__(self, model: nn.Module, dense) -> dict:
        return {"speed": self.speed(model, dense)}


class Caches:
    """Bytes of the blocks and of the key/value cache in bf16; the plan and a filled cache must agree."""

    ITEM = 2

    def __init__(self, source: DenseModel, files, how: dict):
        self.tokens = how["batch"] * min(how["context"], source.context_length)
        self.around = sum(p.numel() for p in source.model.parameters()) - sum(
            p.numel() for p in source.blocks.parameters()
        )

    def describe(self) -> dict:
        return {}

    def __call__(self, model: nn.Module, dense) -> dict:
        per_token = cache_bytes(model) // model.dtype.itemsize * self.ITEM
        planned = getattr(getattr(model.config, "quantization_config", None), "fields", {}).get("counts")
        assert planned is None or planned["kv_bytes_per_token"] == cache_bytes(model), (
            "the plan is wrong about the cache"
        )
        weights = (sum(p.numel() for p in model.parameters()) - self.around) * self.ITEM
        return {
            "kv_bytes_per_token": per_token,
            "weight_bytes": weights,
            "cache_bytes": per_token * self.tokens,
        }


class Exports:
    """Parameters of the model exported in other forms; none where a form cannot have it."""

    def __init__(self, source: DenseModel, files, how: list[str]):
        self.forms = how

    def describe(self) -> dict:
        return {}

    def __call__(self, model: nn.Module, dense) -> dict:
        found = {}
        if not hasattr(model.config, "quantization_config"):
            return found  # the dense model
        with tempfile.TemporaryDirectory() as place:
            save(model, Path(place, "small"))
            for form in self.forms:
                try:
                    found[form] = export(Path(place, "small"), Path(place, form), form).exported
                except UnsupportedModelError:
                    found[form] = None
        return found


class Continuations:
    """What a model writes, greedily, after prompts and in answer to questions in its chat template."""

    def __init__(self, source: DenseModel, files, how: dict):
        self.tokenizer, self.how = source.tokenizer, how
        self.questions = how["questions"] if self.tokenizer.chat_template else []

    def describe(self) -> dict:
        return {"prompts": self.how["prompts"], "questions": self.questions}

    def __call__(self, model: nn.Module, dense) -> dict:
        turns = [[{"role": "user", "content": question}] for question in self.questions]
        options = {"tokenize": False, "add_generation_prompt": True}
        asked = [self.tokenizer.apply_chat_template(turn, **options) for turn in turns]
        prompts = [*self.how["prompts"], *asked]
        return {"texts": [continue_text(model, self.tokenizer, p, max_new_tokens=self.how["tokens"]) for p in prompts]}


MEASURES = {"tasks": Accuracies, "speed": Speeds, "cache": Caches, "exports": Exports, "continuations": Continuations}
