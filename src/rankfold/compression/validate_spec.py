"""A derived spec proves itself on the model at hand, in numbers, before anything uses it.

Shape legend: B sequences, T tokens, D model width.

Three proofs: the blocks, run one by one, give the logits that the model gives; every block computes the same with its
attention replaced by a compressed one of full rank, or attention stays dense; and half of the hidden units of MLP and
experts compute what they compute among all. Traits that names do not show (how pairs rotate, whether a layer rotates at
all, where the stream between attention and MLP is) are those with which the numbers agree. One block is in memory at a
time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .._utils.evaluating import cache_for, evaluating, states_of_tokens
from ..architectures import Architecture, AttentionSpec, BlockView, Dense, ExpertsView, MLPView, left_dense
from ..calibration.moments import wide
from ..calibration.runner import StandIn, Stream, advance, outputs, start
from ..errors import RankfoldError, UnsupportedModelError, first_line
from ..methods import BlockResult
from ..methods.result import put_attention, put_experts, put_projection
from ..models.dense_model import DenseModel
from .kept_proofs import keep_proof, load_proof
from .replace import replaced

log = logging.getLogger(__name__)

SHAPE, SEED = (2, 24), 0  # of the random token ids
LEFT = 0.1  # share of the weights of blocks that may stay dense without a word: norms and routers are less
# Attributes that may say that a layer rotates.
SWITCHES = ("use_rope", "rope", "is_sliding", "sliding_window", "use_rotary")


@dataclass(frozen=True)
class Proof:
    """Largest relative differences over all blocks; ``None`` of attention that stays dense, and of units where no block
    has an MLP or experts that are taken."""

    spec: Architecture
    logits: float
    attention: float | None
    units: float | None


def validated(source: DenseModel) -> DenseModel:
    """Return the source itself; where its spec was derived, after that has been validated.

    Raises:
        UnsupportedModelError: it has not.
    """
    if source.architecture.derived:
        if kept := load_proof(source):
            spec, logits, attention = kept
        else:
            proof = validate_spec(source)
            spec, logits, attention = proof.spec, proof.logits, proof.attention
            keep_proof(source, spec, logits, attention)
        source.architecture = replace(spec, derived=False)
        log.info(
            "model type %r has no spec; the one read off its blocks was checked on this model: logits differ by %.1e%s",
            spec.model_type,
            logits,
            "" if attention is None else f", attention replaced at full rank by {attention:.1e}",
        )
        if spec.attention.unsupported_reason:
            log.warning(
                "attention of model type %r stays dense: %s", spec.model_type, spec.attention.unsupported_reason
            )
        if left := _left_dense(source):
            log.warning("model type %r: %s", spec.model_type, left)
    return source


def _left_dense(source: DenseModel) -> str | None:
    """Say which weights of the blocks are in no part that the spec names, where they are more than a few."""
    total, left = 0, dict[str, int]()
    for view in source.meta_blocks():
        spec, mlp = view.architecture, view.mlp
        parts = [spec.attention_of(view.module).path, *(mlp.paths.values() if mlp else ())]
        inside = tuple(f"{path}." for path in (*parts, *([view.experts.spec.path] if view.experts else ())))
        for name, weight in view.module.named_parameters():
            total += weight.numel()
            if not name.startswith(inside):
                owner = name.rpartition(".")[0]
                left[owner] = left.get(owner, 0) + weight.numel()
    share = sum(left.values()) / total
    if share < LEFT:
        return None
    first, *others = sorted(left, key=lambda name: -left[name])
    return (
        f"{share:.0%} of the weights of its blocks stay dense, as they are in no attention, MLP or experts that can be "
        f"read: {first}{f' and {len(others)} more' if others else ''}"
    )


@torch.no_grad()
def validate_spec(source: DenseModel) -> Proof:
    """Find the traits that names do not show, and check all of the spec.

    Raises:
        UnsupportedModelError: numbers disagree; the message says where and by how much.
    """
    given = source.architecture
    ids = torch.randint(source.config.vocab_size, SHAPE, generator=torch.Generator().manual_seed(SEED))
    try:
        return _prove(source, ids)
    except (RankfoldError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of a family that nobody looked at raises what it likes on a wrong guess
        why = f"running its blocks ends in {type(error).__name__} ({first_line(error)})"
        raise UnsupportedModelError(_because(source, why)) from error
    finally:
        source.architecture = given


def _prove(source: DenseModel, ids: Tensor) -> Proof:
    returns = _look(source.block(0), _started(source, ids)).returns_tuple
    source.architecture = replace(source.architecture, returns_tuple=returns)
    stream = start(source, ids, autocast=None)
    spec, differences, units, rotated = source.architecture, [], [], {}
    for index in range(len(source)):
        view = source.block(index)
        _check_mlp(view, source)
        if index == 0:
            spec = _halves(view, stream, source)
        if not view.attention.spec.unsupported_reason and not spec.attention.unsupported_reason:
            spec, error, rotated[index] = _rotation(spec, view, stream, source, first=not rotated)
            differences.append(error)
        view = replace(view, architecture=spec)
        units += [_units(view, result, stream, source) for result in _half_of_units(view)]
        advance(view, stream)
    if differences and not spec.attention.unsupported_reason:
        spec = _with_rope_switch(spec, rotated, source)
    cache = cache_for(source.model) if spec.attention.unsupported_reason else {}
    got, expected = outputs(source, ids, stream), _as_the_model_runs(source, ids, cache)
    for layers in cache.values():
        found = [sum(x[0].numel() // x.shape[-2] for x in states_of_tokens(layer)) for layer in layers.layers]
        spec = replace(spec, cached=(*found, *[0] * (len(source) - len(found)))[: len(source)])
    source.architecture = spec
    proof = Proof(
        spec,
        _difference(got, expected),
        None if spec.attention.unsupported_reason else max(differences),
        max(units, default=None),
    )
    if proof.logits > _close(source):
        _refuse(source, f"blocks run one by one give other logits than the model, by {proof.logits:.1e}")
    return proof


def _started(source: DenseModel, ids: Tensor) -> Stream:
    """Start a stream before it is known what blocks return: a model that takes two things apart fails on one."""
    try:
        return start(source, ids, autocast=None)
    except (TypeError, ValueError, RuntimeError):
        source.architecture = replace(source.architecture, returns_tuple=True)
        return start(source, ids, autocast=None)


def _close(source: DenseModel) -> float:
    """Return the relative tolerance: a wrong trait changes a hundred times that of fp32, rounding a hundredth."""
    return max(1e-3, 8 * torch.finfo(source.compute_dtype).eps)


def _check_mlp(view: BlockView, source: DenseModel) -> None:
    """Refuse a block that has its MLP elsewhere than others: it would stay dense without a word."""
    if view.mlp_spec and view.mlp is None:
        _refuse(source, f"block {view.index} has no {view.mlp_spec.down}, as others have")


class _Look(NamedTuple):
    """What passes through a block."""

    before: Tensor  # (B, T, D)
    after: Tensor
    inputs: dict[str, Tensor]  # of its children
    outputs: dict[str, Tensor]
    returns_tuple: bool


def _look(view: BlockView, stream: Stream) -> _Look:
    block, before = view.module, stream.hidden[0]
    down = view.mlp.spec.down if view.mlp else None
    watched = {name: m for name, m in block.named_modules() if name and ("." not in name or name == down)}
    watched[view.attention.spec.path] = view.attention.module
    inputs, outputs = {}, {}

    def note(name: str):
        def hook(_, args, kwargs, output):
            given = args[0] if args else kwargs.get("hidden_states")
            sent = output[0] if isinstance(output, tuple) else output
            inputs[name], outputs[name] = (_like(before, x) for x in (given, sent))

        return hook

    handles = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in watched.items()]
    args, kwargs, _ = stream.calls[0][view.index]
    output = block(before, *args, **kwargs)
    for handle in handles:
        handle.remove()
    returns = isinstance(output, tuple)
    return _Look(before, output[0] if returns else output, inputs, outputs, returns)


def _like(before: Tensor, x: Any) -> Any:
    """Return it as ``(B, T, D)`` where it is the same in one row, ``(B T, D)``, as some layers take it."""
    return x.view(before.shape) if isinstance(x, Tensor) and x.shape == before.flatten(0, -2).shape else x


def _halves(view: BlockView, stream: Stream, source: DenseModel) -> Architecture:
    """Find where the stream between attention and MLP is, and whether both add to it what they send."""
    spec, look, path = view.architecture, _look(view, stream), view.attention.spec.path
    if path not in look.outputs:
        _refuse(source, f"{path} of a block is never called")
    close, sent, whole = _close(source), look.outputs[path], look.after - look.before
    if sent.shape != whole.shape:
        shapes = f"{tuple(sent.shape)}, and what blocks hand on is {tuple(whole.shape)}"
        _refuse(source, f"{path} of a block sends {shapes}")
    mlp = _mlp_sends(view, look)
    for name, x in look.inputs.items():
        if "." in name or not isinstance(x, Tensor) or x.shape != whole.shape:
            continue
        if min(_difference(look.before, x), _difference(x, look.before)) < close:
            continue
        step, rest = x - look.before, look.after - x
        if all(any(_parallel(part, y, close) for y in look.outputs.values()) for part in (step, rest)):
            plain = _difference(step, sent) < close and all(_difference(rest, y) < close for y in mlp)
            return replace(spec, middle=name, is_plain_residual=plain)
    if any(_difference(whole - sent, y) < close for y in [*mlp, *look.outputs.values()]):
        return replace(spec, middle=None, is_plain_residual=True)  # both halves read the same stream
    _refuse(source, "no module of a block receives the stream between attention and MLP")


def _mlp_sends(view: BlockView, look: _Look) -> list[Tensor]:
    """Return what the MLP of a block sends, or its experts with what is beside them; nothing where none is taken."""
    if view.experts is None:
        return [look.outputs[view.mlp.spec.down]] if view.mlp else []
    (owner,) = view.experts.spec.owners
    beside = [view.mlp.spec.down] if view.mlp and not view.mlp.spec.down.startswith(f"{owner}.") else []
    return [reduce(torch.add, (look.outputs[name] for name in (owner, *beside)))]


def _parallel(a: Tensor, b, close: float) -> bool:
    """Tell whether they agree up to a factor, which some families put after each half."""
    if not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() > 1 - close**2


def _forms(attention: AttentionSpec) -> list[dict]:
    """List ways to read the projections that names do not tell apart."""
    return [
        {"layout": layout, "rope_style": style, "interleaved_table": table}
        for layout in (("split",) if len(attention.qkv) == 3 else ("concat", "grouped"))
        for style, table in (("neox", False), ("gptj", False), ("gptj", True))
    ]


def _rotation(spec: Architecture, view: BlockView, stream: Stream, source: DenseModel, first: bool):
    """Find the spec with which attention at full rank computes this block, the difference, and whether it rotates.

    Where there is none, attention of this family stays as it is.
    """
    given, best, expected = spec.attention, float("inf"), _sent(view, BlockResult(), stream, source)
    for form in _forms(given) if first else [{}]:
        for position in dict.fromkeys((given.position, "none")):
            tried = replace(spec, attention=replace(given, **form, position=position))
            error = _attention(replace(view, architecture=tried), expected, stream, source)
            best = min(best, error)
            if error < _close(source):
                return replace(spec, attention=replace(given, **form)), error, position != "none"
    reason = f"block {view.index} computes something else with its attention replaced, by {best:.1e}"
    return replace(spec, attention=left_dense(given, reason)), best, True


def _attention(view: BlockView, expected: Tensor, stream: Stream, source: DenseModel) -> float:
    """Return the relative change of what the block adds, ``expected``, when its attention is replaced at full rank."""
    attention, result = view.attention, BlockResult()
    width = attention.head_dim
    try:
        projections = dict(zip("qkvo", (*attention.qkv(), attention.output), strict=True))
        put_attention(result, attention, projections, width, width)
        return _difference(_sent(view, result, stream, source), expected)
    except (RuntimeError, TypeError, ValueError, IndexError):  # shapes or tables that cannot be: another form, then
        return float("inf")


def _half_of_units(view: BlockView) -> list[tuple[BlockResult, BlockResult]]:
    """Half of the hidden units alone, and all of them of which the others are not listened to: of MLP and experts."""
    found = []
    if view.mlp is not None:
        found.append(_put_units(view.mlp, _some(view.mlp.hidden, view)))
    if view.experts is not None:
        found.append(_put_units_of_experts(view.experts, _some(view.experts.hidden, view)))
    return found


def _some(units: int, view: BlockView) -> Tensor:
    return torch.randperm(units, generator=torch.Generator().manual_seed(SEED))[: units // 2].to(view.device)


def _put_units(mlp: MLPView, keep: Tensor) -> tuple[BlockResult, BlockResult]:
    fewer, silent, down = BlockResult(), BlockResult(), mlp.down
    for path, projection in mlp.rising().items():
        put_projection(fewer, path, projection.rows(mlp.rows_of(keep)))
    put_projection(fewer, mlp.spec.down, Dense(down.weight[:, keep], down.bias))
    put_projection(silent, mlp.spec.down, _heard(down, keep))
    return fewer, silent


def _put_units_of_experts(experts: ExpertsView, keep: Tensor) -> tuple[BlockResult, BlockResult]:
    fewer, silent, everything = BlockResult(), BlockResult(), torch.arange(experts.hidden)
    downs = [experts.down(expert) for expert in range(experts.count)]
    put_experts(fewer, experts, [(keep, Dense(down.weight[:, keep], down.bias)) for down in downs])
    put_experts(silent, experts, [(everything.to(keep), _heard(down, keep)) for down in downs])
    return fewer, silent


def _heard(down: Dense, keep: Tensor) -> Dense:
    return Dense(torch.zeros_like(down.weight).index_copy(1, keep, down.weight[:, keep]), down.bias)


def _units(view: BlockView, halves: tuple[BlockResult, BlockResult], stream: Stream, source: DenseModel) -> float:
    """Return the relative difference between the two, which is none where hidden units do not depend on each other."""
    fewer, silent = halves
    expected = _sent(view, silent, stream, source)
    try:
        error = _difference(_sent(view, fewer, stream, source), expected)
    except RuntimeError as wrong:  # as of a norm over all hidden units
        _refuse(source, f"block {view.index} does not run with half of its hidden units ({first_line(wrong)})")
    if error > _close(source):
        _refuse(source, f"hidden units of block {view.index} depend on each other, by {error:.1e}")
    return error


def _sent(view: BlockView, result: BlockResult, stream: Stream, source: DenseModel) -> Tensor:
    """Return what the block adds to the stream with these modules in it."""
    with replaced(view, result, source):
        there = stream.copy()
        advance(view, there)
        return there.hidden[0] - stream.hidden[0]


def _with_rope_switch(spec: Architecture, rotated: dict[int, bool], source: DenseModel) -> Architecture:
    """Return the spec with the attribute that says which layers rotate, where not all do or none."""
    if len(set(rotated.values())) == 1:
        position = spec.attention.position if all(rotated.values()) else "none"
        return replace(spec, attention=replace(spec.attention, position=position))
    modules = {index: source.meta_block(index).attention.module for index in rotated}
    for name in SWITCHES:
        if all(bool(getattr(modules[index], name, None)) == rotates for index, rotates in rotated.items()):
            return replace(spec, attention=replace(spec.attention, applies_rope=name))
    _refuse(source, "some layers rotate and some do not, and no attribute of theirs says which")


class _Read(StandIn):
    """Reads the weights of a block when it is called."""

    def __init__(self, block: nn.Module, read: Callable[[], nn.Module]):
        super().__init__(block)
        self.read = read

    def forward(self, *args, **kwargs):
        return self.read()(*args, **kwargs)


def _as_the_model_runs(source: DenseModel, ids: Tensor, cache: dict[str, Any]) -> Tensor:
    """Return the logits of the model's own forward."""
    blocks, (path, _, name) = source.blocks, source.architecture.blocks.rpartition(".")
    owner = source.model.get_submodule(path)

    def read(index: int) -> nn.Module:
        setattr(owner, name, blocks)  # which the source reads them by
        try:
            return source.block(index).module
        finally:
            setattr(owner, name, stand)

    stand = nn.ModuleList(_Read(block, partial(read, index)) for index, block in enumerate(blocks))
    setattr(owner, name, stand)
    try:
        with evaluating(source.model):
            return source.model(input_ids=ids.to(source.device), use_cache=bool(cache), **cache).logits
    finally:
        setattr(owner, name, blocks)


def _difference(a: Tensor, b: Tensor) -> float:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return float("inf")
    a, b = wide(a), wide(b)
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def _refuse(source: DenseModel, why: str) -> NoReturn:
    raise UnsupportedModelError(_because(source, why))


def _because(source: DenseModel, why: str) -> str:
    return (
        f"model type {source.config.model_type!r} has no spec, and the one read off its blocks does not hold: {why}; "
        "see docs/add-an-architecture.md, and `rankfold models` for the families there are"
    )
