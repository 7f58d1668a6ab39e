"""Which options of the latent methods are in range, and which exclude each other."""

from ...allocation import FLOPs
from ...errors import OptionError, check_choice, option
from ...linalg.junction import JUNCTIONS
from ...linalg.preconditioner import PRECONDITIONERS
from ...linalg.sparse import METHODS as SHRINKS
from .layout import FISHER, PLAIN, QKV

JOINT = ("qk", "vo", "ud")
QK_RANKS = ("plan", "spectra")
COARSE = 4  # bits to which the codes of some junctions lose much (docs/results/latentllm_options.md)
ROUNDED_BADLY = ("lu", "block_identity_left")


def check_options(method) -> None:
    """Raise :class:`OptionError` for an option out of range or two that exclude each other."""
    _check_ranges(method)
    if (method.bits or method.sparse) and not method.sparsity and not method.own_sparsities:
        raise OptionError("bits and sparse change modules that lose weights, and sparsity 0 leaves all dense; raise it")
    if method.attention_aware and "vo" not in method.joint_asked:
        raise OptionError(
            f"attention_aware=true refits the joint value-output form; use joint=vo, got {method.joint!r}"
        )
    if isinstance(method.budget, FLOPs) and (method.junction == "lu" or method.head_junction):
        raise OptionError(
            "budget flops counts the weights stored, and junction=lu and head_junction=true multiply more than they "
            "store; use another budget or junction"
        )
    if method.features and (method.sparse or method.joint_asked):
        raise OptionError(
            f"method {method.name} fits the components of each layer's own output; leave out sparse and joint, or use "
            f"{option('method', 'rootcov')}"
        )
    if method.sparse:
        _check_sparse(method)
    if method.precondition == FISHER:
        _check_fisher(method)
    if method.shared_qkv:
        _check_shared(method)
    elif QKV in (method.modules or ()):
        raise OptionError("module 'qkv' exists with shared_qkv=true only; use q,k,v")
    if method.split_head:
        _check_split(method)
    if method.head_junction:
        _check_pairs(method)
        _check_junction(method, "head_junction=true", ("block_identity_right", *PLAIN))
    if method.qk_ranks == "spectra":
        _check_spectra(method)


def _check_ranges(method) -> None:
    check_choice("precondition", method.precondition, (*PRECONDITIONERS, FISHER))
    check_choice("junction", method.junction, JUNCTIONS)
    check_choice("shrink", method.shrink, SHRINKS)
    check_choice("qk_ranks", method.qk_ranks, QK_RANKS)
    for pair in method.joint_asked:
        check_choice("joint", pair, JOINT)
    for key, least in {"alternations": 1, "chunk": 1, "window": 0, "rounds": 0, "ridge": 0}.items():
        if getattr(method, key) < least:
            raise OptionError(f"{key} must be >= {least}, got {getattr(method, key)}")
    if not method.alpha > 0:
        raise OptionError(f"alpha must be > 0, got {method.alpha}; 0.5 is the usual exponent")
    if not method.condition_limit >= 1:
        raise OptionError(f"condition_limit must be >= 1, got {method.condition_limit}; the default is 1e8")
    if method.bits and not 2 <= method.bits <= 8:
        raise OptionError(f"bits must be 0 (not quantised) or 2 to 8, got {method.bits}")
    if not 0 <= method.sparse <= 1:
        raise OptionError(f"sparse must be in [0, 1], got {method.sparse}; 0.1 gives a tenth of the kept weights")


def _check_sparse(method) -> None:
    if method.precondition != "rootcov":
        raise OptionError(f"sparse > 0 fits the root covariance; use precondition=rootcov, got {method.precondition!r}")
    if method.joint_asked:
        raise OptionError(
            f"sparse > 0 corrects the output of each layer, joint={method.joint} fits products of two; "
            "use joint=auto or none"
        )
    _refuse(method, "sparse > 0", "head_junction", "split_head", "qk_ranks")
    if method.sparse == 1:
        _check_alone(method)


def _check_alone(method) -> None:
    """Without a low rank there are no factors to share, to quantise, or to put into a junction."""
    if method.shared_qkv:
        raise OptionError("sparse=1 has no latent that shared_qkv=true could share; leave one out")
    if method.bits:
        raise OptionError(
            f"bits are of factors, sparse=1 has none, and sparse values stay; leave out bits={method.bits}"
        )
    if method.junction != "block_identity_right":
        raise OptionError(
            f"sparse=1 has no factors for a junction; use junction=block_identity_right, the default, "
            f"got {method.junction!r}"
        )


def _check_shared(method) -> None:
    _refuse_joint(method, "shared_qkv=true")
    _refuse(method, "shared_qkv=true", "head_junction", "split_head", "qk_ranks")
    for module in method.modules or ():
        if module in ("q", "k", "v"):
            raise OptionError(f"module {module!r} is part of 'qkv' with shared_qkv=true; use qkv")


def _check_fisher(method) -> None:
    if method.joint_asked:
        raise OptionError(
            f"precondition=fisher weighs the columns of one layer, joint={method.joint} fits two; "
            "use joint=auto or none"
        )
    _refuse(method, "precondition=fisher", "split_head")
    if method.shared_qkv:
        raise OptionError(
            "precondition=fisher weighs q, k and v each by itself, without shared_qkv=true; leave one out"
        )


def _check_split(method) -> None:
    _refuse_joint(method, "split_head=true")
    _refuse(method, "split_head=true", "head_junction", "qk_ranks")
    _check_junction(method, "split_head=true", ("block_identity_left", *PLAIN))


def _check_pairs(method) -> None:
    named = set(method.modules or "qkvo")
    if not ({"q", "k"} <= named or {"v", "o"} <= named):
        raise OptionError(
            "head_junction=true acts on q and k together, and on v and o; name both of a pair in modules, "
            f"got {','.join(method.modules)}"
        )


def _check_spectra(method) -> None:
    if method.modules is not None and not {"q", "k"} <= set(method.modules):
        raise OptionError(
            f"qk_ranks=spectra acts on q and k together; name both in modules, got {','.join(method.modules)}"
        )
    _refuse(method, "qk_ranks=spectra", "head_junction")
    if method.joint != "auto" and "qk" not in method.joint_asked:
        raise OptionError(
            f"qk_ranks=spectra is for the joint query-key form; use joint=auto or qk, got {method.joint!r}"
        )
    _check_junction(method, "qk_ranks=spectra", tuple(j for j in JUNCTIONS if j not in PLAIN))


def _check_junction(method, what: str, allowed: tuple[str, ...]) -> None:
    if method.junction not in allowed:
        raise OptionError(f"{what} takes the junctions {', '.join(allowed)}; got {method.junction!r}")


def _refuse_joint(method, what: str) -> None:
    clash = [pair for pair in method.joint_asked if pair != "ud"]
    if clash:
        raise OptionError(f"{what} fits queries, keys and values its own way, without joint={clash[0]}; use joint=auto")


def _refuse(method, what: str, *others: str) -> None:
    off = {"head_junction": False, "split_head": False, "qk_ranks": "plan"}
    for key in others:
        if getattr(method, key) != off[key]:
            raise OptionError(f"{what} and {key}={str(getattr(method, key)).lower()} exclude each other; leave one out")
