"""What `compress` and `plan` both take: one model or several components, what is done, and what it is measured on."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..errors import OptionError, check_choice
from . import common as c
from . import options as o
from .calibration import CalibrationOptions
from .config import Run, Settings

if TYPE_CHECKING:
    from ..calibration.store import MomentStore
    from ..data.calibration_data import CalibrationData
    from ..methods import Method
    from ..models.dense_model import DenseModel
    from ..report.goal import Goal
    from ..report.plan import Plan

Group = TypeVar("Group", o.MethodOptions, CalibrationOptions)
Opened = tuple["DenseModel", "Method", CalibrationOptions]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compressed, and how."""

    model: o.Model
    config: Run = None
    component: o.Component = None
    components: o.Components = None
    revision: o.Revision = None
    device: o.Device = "auto"
    offload: o.Offload = None
    target_size: o.TargetSize = None
    keep_quality: o.KeepQuality = None
    what: o.MethodOptions
    text: CalibrationOptions
    moments: o.Moments = None
    dtype: o.Written = "auto"

    def methods(self) -> "dict[str | None, Method]":
        """Return what is done to each component, in their order; to the one of ``--component`` under ``None``.

        Raises:
            OptionError: not sparsities of different components, or an option or a size that does not parse.
        """
        self.goal()
        if self.components is None:
            return {None: self.what.parse()}
        methods: dict[str | None, Method] = {}
        for name, sparsity in _parse_components(self.components).items():
            method = self._of(name, self.what).parse()
            if method.own_sparsities and not self.config:
                raise OptionError(
                    f"--components gives each component its sparsity, --modules {self.what.modules} would take its "
                    f"place; name the modules only, e.g. --modules {','.join(method.own_sparsities)}"
                )
            methods[name] = replace(method, sparsity=sparsity)
        return methods

    def _of(self, name: str, group: Group) -> Group:
        """Return a group of options with the settings of one component."""
        found: Settings = next((one for one in self.config or () if one.get("component") == name), {})
        names = {field.name for field in fields(group)}
        return replace(group, **{key: value for key, value in found.items() if key in names})

    def _texts(self, names: "list[str]") -> dict[str, CalibrationOptions]:
        recorded = {one.get("component") for one in self.config or () if "calibration" in one}
        if recorded >= {*names}:
            return {name: self._of(name, self.text) for name in names}
        return self.text.of_components(names)

    def stored(self) -> "MomentStore | None":
        """Open the moments that take the place of a calibration set."""
        from ..calibration.store import MomentStore

        return MomentStore.open(self.moments) if self.moments else None

    def open(self, methods: "dict[str | None, Method]") -> list[Opened]:
        """Open each component, with what is done to it and what it is to be calibrated on."""
        from ..compression.validate_spec import validated
        from ..models.opening import open_model
        from ..target_size import method_of_size

        model, options = o.at_revision(self.model, self.revision), {"dtype": self.dtype, "device": self.device}
        named = [name for name in methods if name is not None]
        texts: dict[str | None, CalibrationOptions] = {**self._texts(named)} if named else {None: self.text}
        sources = {
            name: validated(open_model(model, component=name or self.component, **options, offload=self.offload))
            for name in methods
        }
        for name, source in sources.items():
            methods[name].supported_modules(source.architecture, source.meta_block(0))
            methods[name] = method_of_size(source, methods[name], self.goal())
        return [(source, methods[name], texts[name]) for name, source in sources.items()]

    def goal(self) -> "Goal | None":
        """Return what the size of a run is for, where one was asked for."""
        from ..report.goal import goal_of

        return goal_of(self.target_size, self.keep_quality)

    def plans(self, methods: "dict[str | None, Method]", mode: str) -> "list[Plan]":
        """Plan each component; the language model is measured after the dense tower, not after the compressed one."""
        from .. import pipeline
        from ..compression.duration import timed
        from ..quality import method_to_keep

        plans, store, goal = [], self.stored(), self.goal()
        for source, method, text in self.open(methods):
            tokens = None if store else text.load(source)
            if self.keep_quality is not None:
                method = method_to_keep(source, method, self.keep_quality, tokens, store)
            if tokens is None:
                plans.append(pipeline.plan(source, method, moments=store, goal=goal))
                continue
            the_plan = pipeline.plan(source, method, tokens, moments=_predicting(source, method, tokens), goal=goal)
            plans.append(timed(the_plan, source, tokens.describe(), mode))
        return plans

    def predicted(self, methods: "dict[str | None, Method]", gpu: str, gpus: int) -> "Plan":
        """Plan by the shapes of a config for accelerators that are not here.

        Raises:
            OptionError: the record is of other components; see :func:`rankfold.plan`.
        """
        from .. import api

        of = self.components or self.component  # of a record: on the command line they are refused before
        if of not in (None, "language"):
            raise OptionError(
                "--gpu plans one component by the shapes of a config alone, the language model where there is one, "
                f"and --config is of {of}; leave one of them out"
            )
        (method,) = methods.values()
        return api.plan(
            self.model,
            target_size=self.target_size,
            method=method,
            num_samples=self.text.num_samples,
            max_length=self.text.max_length,
            dtype=self.dtype,
            revision=self.revision,
            offload=self.offload,
            gpu=gpu,
            gpus=gpus,
        )


def _predicting(source: "DenseModel", method: "Method", tokens: "CalibrationData") -> "MomentStore | None":
    """Measure moments that errors can be predicted from, for a method that takes any."""
    from .. import pipeline
    from ..compression.importance import needed

    if "one-pass" not in method.modes:
        return None
    return pipeline.calibrate(source, tokens, statistics=needed(source, method))


def _parse_components(text: str) -> dict[str, float]:
    from ..architectures import PARTS

    given = [item.partition("=")[::2] for item in text.split(",") if item.strip()]
    names = [name.strip() for name, _ in given]
    for name in names:
        check_choice("component", name, PARTS)
        if names.count(name) > 1:
            raise OptionError(f"--components names {name!r} more than once; name it once")
    try:
        found = {name: float(value) for name, (_, value) in zip(names, given, strict=True)}
    except ValueError:
        raise OptionError(
            f"--components takes a sparsity for each, e.g. language=0.3,vision=0.2; got {text!r}"
        ) from None
    if len(found) < 2:
        raise OptionError(
            f"--components takes two components or more, e.g. language=0.3,vision=0.2; got {text!r}; for one of them "
            "give --component and --sparsity"
        )
    return {name: found[name] for name in PARTS if name in found}


def show_plans(plans: "list[Plan]", output: Path | None, as_json: bool) -> None:
    """Print a plan, or those of several components, and save it where asked."""
    first, *more = (plan.to_dict() for plan in plans)
    value = {"components": {plan["part"]: plan for plan in (first, *more)}} if more else first
    if output is not None:
        from .._utils.files import write_json

        write_json(output, value)
    tables = [table for plan in plans for table in (plan.table(), plan.summary())]
    c.emit(value, as_json, lambda out: out.print(*tables))
