"""What the description of a module may say: it may come from a stranger."""

import math

_SIZES = ("in", "out", "rank", "heads", "kv_heads", "qk_dim", "vo_dim", "bits", "chunk", "nonzeros", "head_identity")
_SIZES += ("width", "before", "inside", "behind", "experts")
_MAY_BE_ZERO = {"linear": ("in", "out"), "attention": ("qk_dim", "vo_dim"), "packed_attention": ("qk_dim", "vo_dim")}
_FAMILYS_OWN = {  # numbers of an attention that its family sets -> what they may be, and which are
    "scaling": ("a number", math.isfinite),
    "softcap": ("a positive number", lambda value: 0 < value < math.inf),
    "growth": ("a number", math.isfinite),
    "growth_step": ("a positive number", lambda value: 0 < value < math.inf),
    "rotary_base": ("a positive number", lambda value: 0 < value < math.inf),
    "rotary_dim": ("an even number", lambda value: value >= 0 and value % 2 == 0),
    "window": ("an integer that is not negative", lambda value: isinstance(value, int) and value >= 0),
    "sliding_window": ("an integer that is not negative", lambda value: isinstance(value, int) and value >= 0),
    "dropout": ("in [0, 1]", lambda value: 0 <= value <= 1),
    "output_dropout": ("in [0, 1]", lambda value: 0 <= value <= 1),
}


def check_description(spec: dict, kinds) -> None:
    """Raise :class:`ValueError` where the kind is none of ``kinds``, or a size is no positive integer.

    Widths of plain layers and of attention may be 0: a module of which nothing is left but a bias.
    """
    kind = spec.get("kind")
    if kind is None or kind not in kinds:
        raise ValueError(f"unknown module kind {kind!r}; this version of rankfold reads: {', '.join(sorted(kinds))}")
    if not isinstance(spec.get("basis", ""), str):
        raise ValueError(f"'basis' of a {kind} module must be the path of a layer, got {spec['basis']!r}")
    for key in _SIZES:
        least = 0 if key in _MAY_BE_ZERO.get(kind, ()) else 1
        if key in spec and not (isinstance(spec[key], int) and least <= spec[key] < 2**31):
            allowed = "a positive integer" if least else "an integer that is not negative"
            raise ValueError(f"{key!r} of a {kind} module must be {allowed}, got {spec[key]!r}")


def check_attention(spec: dict) -> None:
    """Raise :class:`ValueError` where an attention could be built and not run.

    That is so for numbers that are none, widths of projections that are not those of its heads, or a latent to cache
    that there is not.
    """
    for key, (allowed, is_so) in _FAMILYS_OWN.items():
        value = spec.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and is_so(value)):
            raise ValueError(f"{key!r} of an attention must be {allowed}, got {value!r}")
    if spec.get("growth") and not spec.get("growth_step"):
        raise ValueError("'growth' of an attention needs a 'growth_step', the positions between two steps")
    heads, kv_heads, qk_dim, vo_dim = (spec[key] for key in ("heads", "kv_heads", "qk_dim", "vo_dim"))
    if heads % kv_heads:
        raise ValueError(f"kv_heads of an attention must divide its {heads} heads, got {kv_heads}")
    if (qk_dim == 0) != (vo_dim == 0):
        raise ValueError(f"an attention has both widths or none, got qk_dim {qk_dim} and vo_dim {vo_dim}")
    if spec.get("selected_pairs") and qk_dim % 2:
        raise ValueError(f"qk_dim of an attention that turns pairs must be even, got {qk_dim}")
    widths = {"q": heads * qk_dim, "k": kv_heads * qk_dim, "v": kv_heads * vo_dim}
    sides = {"qkv": ("out", sum(widths.values()))} if "qkv" in spec else {n: ("out", w) for n, w in widths.items()}
    sides |= {"o": ("in", heads * vo_dim)} if "o" in spec else {}
    for name, (side, width) in sides.items():
        if spec[name][side] != width:
            raise ValueError(f"{name!r} of this attention must have {side} {width}, got {spec[name][side]!r}")
    for name in spec.get("latent_cache", ()):
        if spec["qkv" if "qkv" in spec else name]["kind"] != "latent":
            raise ValueError(f"{name!r} of this attention has no latent to cache")
