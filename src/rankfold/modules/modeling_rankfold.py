"""What runs inside a compressed model: the modules, and how ``from_pretrained`` puts them in place.

This one file is self-contained (torch and transformers only). A copy of it lies beside the weights of every compressed
checkpoint, so that the checkpoint also loads where rankfold is not installed::

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

With ``import rankfold`` no remote code is needed; the file then comes from the package.

How it works: ``config.json`` names, under ``quantization_config``, each replaced module with its sizes. Transformers
builds the dense architecture on the meta device, a registered ``HfQuantizer`` swaps the named modules for smaller ones
(:func:`install`), and the ordinary loader fills them. Nothing here knows a model family.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, K key/value heads, G = H / K, R kept query-key
width, V kept value width, P = R / 2 rotary pairs, D model width.
"""

import functools
import os
import shutil

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["CompressedAttention", "LatentLinear", "RankfoldConfig", "RankfoldForCausalLM", "attach", "build", "install"]

METHOD_NAME = "rankfold"
FORMAT = 1
CODE_FILE = "modeling_rankfold.py"


class LatentLinear(nn.Module):
    """``y = B (A x) + b`` through a latent of width ``rank``; the junction decides what of ``A`` and ``B`` is stored.

    * ``plain``: ``A`` (rank, in) and ``B`` (out, rank).
    * ``block_identity_right``: ``A = [I | A_2]`` after a permutation of the inputs; the identity is neither stored nor
      multiplied: ``z = x[p_1] + A_2 x[p_2]``. Stores ``rank * (out + in - rank)`` numbers, fewer than ``out * in``.
    * ``block_identity_left``: the mirror, ``y[q_1] = z``, ``y[q_2] = B_2 z``.
    * ``lu``: ``B`` unit lower, ``A`` upper trapezoidal; only the entries that are not fixed are stored.

    LatentLLM (arXiv:2505.18413), Sec. 3.3 and App. A.2.
    """

    def __init__(self, spec: dict):
        super().__init__()
        self.in_features, self.out_features, self.rank = spec["in"], spec["out"], spec["rank"]
        self.form = spec["form"]
        if self.form not in ("plain", "block_identity_right", "block_identity_left", "lu"):
            raise ValueError(f"unknown form {self.form!r} of a latent linear layer")
        if self.rank > min(self.in_features, self.out_features):
            raise ValueError(f"rank {self.rank} of a ({self.out_features}, {self.in_features}) layer is too large")
        A, B = self.shapes(spec)
        self.A, self.B = nn.Parameter(torch.empty(A)), nn.Parameter(torch.empty(B))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if spec["bias"] else None
        if self.form in ("block_identity_right", "lu"):
            self.register_buffer("columns", torch.zeros(self.in_features, dtype=torch.int32))
        if self.form in ("block_identity_left", "lu"):
            self.register_buffer("rows", torch.zeros(self.out_features, dtype=torch.int32))

    @staticmethod
    def shapes(spec: dict) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the stored ``A`` and ``B``."""
        wide, tall, rank = spec["in"], spec["out"], spec["rank"]
        if spec["form"] == "lu":
            return (rank * wide - rank * (rank - 1) // 2,), (rank * tall - rank * (rank + 1) // 2,)
        A = (rank, wide - rank) if spec["form"] == "block_identity_right" else (rank, wide)
        B = (tall - rank, rank) if spec["form"] == "block_identity_left" else (tall, rank)
        return A, B

    def down(self, x):
        """``(..., in) -> (..., rank)``."""
        if self.form == "block_identity_right":
            x = x[..., self.columns.long()]
            return x[..., : self.rank] + nn.functional.linear(x[..., self.rank :], self.A)
        if self.form == "lu":
            return nn.functional.linear(x[..., self.columns.long()], self._upper())
        return nn.functional.linear(x, self.A)

    def up(self, z, bias=True):
        """``(..., rank) -> (..., out)``."""
        b = self.bias if bias else None
        if self.form == "block_identity_left":
            y = torch.cat([z, nn.functional.linear(z, self.B)], -1)[..., torch.argsort(self.rows.long())]
            return y if b is None else y + b
        if self.form == "lu":
            y = nn.functional.linear(z, self._lower())[..., torch.argsort(self.rows.long())]
            return y if b is None else y + b
        return nn.functional.linear(z, self.B, b)

    def up_matrix(self):
        """Dense ``(out, rank)`` of :meth:`up`, without the bias."""
        if self.form in ("plain", "block_identity_right"):
            return self.B
        return self.up(torch.eye(self.rank, dtype=self.B.dtype, device=self.B.device), bias=False).T

    def forward(self, x):
        return self.up(self.down(x))

    def _upper(self):
        full = self.A.new_zeros(self.rank, self.in_features)
        i, j = torch.triu_indices(self.rank, self.in_features, device=self.A.device)
        return full.index_put((i, j), self.A)

    def _lower(self):
        full = torch.eye(self.out_features, self.rank, dtype=self.B.dtype, device=self.B.device)
        i, j = torch.tril_indices(self.out_features, self.rank, -1, device=self.B.device)
        return full.index_put((i, j), self.B)


class CompressedAttention(nn.Module):
    """Causal self-attention whose query-key width R and value width V need not be the head dimension.

    It stands in for the attention module of any family: it takes the names each of them is called with, and differs from
    them in three things only. The softmax scale is stored (it belongs to the ORIGINAL head dimension). Rotary pairs are
    chosen per key/value head, by an index into the model's own cos/sin table, so that a reduced key is still a rotated
    key. And keys and values may have different widths, so the cache holds ``K * (R + V)`` numbers per token.
    """

    def __init__(self, spec: dict, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.kv_heads = spec["heads"], spec["kv_heads"]
        self.num_key_value_groups = self.heads // self.kv_heads  # the name transformers' attention kernels read
        self.qk_dim, self.vo_dim = spec["qk_dim"], spec["vo_dim"]
        self.scaling, self.softcap = spec["scaling"], spec.get("softcap")
        self.sliding_window = spec.get("sliding_window")
        self.attention_dropout = spec.get("dropout", 0.0)
        self.output_dropout = spec.get("output_dropout", 0.0)
        self.is_causal = True
        self.adds_alibi = spec.get("alibi", False)  # Falcon passes ALiBi too, but has already put it into the mask
        self.rotary_dim = spec.get("rotary_dim", 0)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (build(spec[name]) for name in ("q", "k", "v", "o"))
        # Which side caches its latent instead of heads: keys only where nothing rotates or normalises them afterwards.
        self.latent_keys, self.latent_values = "k" in spec.get("latent_cache", ()), "v" in spec.get("latent_cache", ())
        self.q_norm = self.k_norm = None  # adopted from the dense module by `build` where the family has them
        if spec.get("selected_pairs"):
            # Row p of head k says which rotary frequency pair p turns with; `rotary_dim / 2` means "does not turn".
            self.register_buffer("rotary_pairs", torch.zeros(self.kv_heads, self.qk_dim // 2, dtype=torch.int32))
        else:
            self.rotary_pairs = None

    def forward(
        self,
        hidden_states,
        residual=None,
        *,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        layer_past=None,
        alibi=None,
        **kwargs,
    ):
        B, T, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(B, T, self.heads, self.qk_dim)
        if self.q_norm is not None:
            query = self.q_norm(query)
        query = query.transpose(1, 2)  # (B, H, T, R)
        if self.latent_keys:
            key = self.k_proj.down(hidden_states)[:, None]  # (B, 1, T, latent)
        else:
            key = self._keys(self.k_proj(hidden_states))
        if self.rotary_dim:
            query, key = self._rotate(query, key, *position_embeddings)
        if self.latent_values:
            value = self.v_proj.down(hidden_states)[:, None]  # (B, 1, T, latent)
        else:
            value = self._values(self.v_proj(hidden_states))

        cache = past_key_values if past_key_values is not None else layer_past
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.adds_alibi and alibi is not None:
            attention_mask = _add_alibi(alibi, attention_mask, B, self.heads, query.dtype)

        if cache is not None and T == 1 and (self.latent_keys or self.latent_values):
            output, weights = self._attend_latent(query, key, value, attention_mask)
        else:
            key = self._keys(self.k_proj.up(key[:, 0])) if self.latent_keys else key
            value = self._values(self.v_proj.up(value[:, 0])) if self.latent_values else value
            output, weights = self._attend(query, key, value, attention_mask, kwargs)
        output = self.o_proj(output.reshape(B, T, self.heads * self.vo_dim))
        if self.training and self.output_dropout:
            output = nn.functional.dropout(output, self.output_dropout)
        return (output if residual is None else output + residual), weights

    def _keys(self, x):
        x = x.view(*x.shape[:2], self.kv_heads, self.qk_dim)
        return (x if self.k_norm is None else self.k_norm(x)).transpose(1, 2)  # (B, K, T, R)

    def _values(self, x):
        return x.view(*x.shape[:2], self.kv_heads, self.vo_dim).transpose(1, 2)  # (B, K, T, V)

    def _attend_latent(self, query, key, value, mask):
        """One new token against a cache of latents, which are never expanded (the absorbed form of latent attention).

        Scores: ``q^T B_k c = (B_k^T q)^T c``; a key bias adds the same number to all scores of a query and drops out of
        the softmax. Outputs: attention is averaged over latents first, then expanded (LatentLLM Eq. 18).
        """
        B, H, G = query.shape[0], self.heads, self.num_key_value_groups
        if self.latent_keys:
            up = self.k_proj.up_matrix().view(self.kv_heads, self.qk_dim, -1).repeat_interleave(G, 0)  # (H, R, latent)
            scores = torch.einsum("bhr,hrl->bhl", query[:, :, 0], up) @ key[:, 0].transpose(-1, -2)  # (B, H, S)
        else:
            grouped = query.view(B, self.kv_heads, G, self.qk_dim)
            scores = (grouped @ key.transpose(-1, -2)).view(B, H, -1)
        scores = _masked(scores[:, :, None] * self.scaling, mask, self.softcap)[:, :, 0]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        if self.latent_values:
            mixed = weights @ value[:, 0]  # (B, H, latent)
            up = self.v_proj.up_matrix().view(self.kv_heads, self.vo_dim, -1).repeat_interleave(G, 0)
            output = torch.einsum("bhl,hvl->bhv", mixed, up)
            if self.v_proj.bias is not None:
                output = output + self.v_proj.bias.view(self.kv_heads, self.vo_dim).repeat_interleave(G, 0)
        else:
            output = (weights.view(B, self.kv_heads, G, -1) @ value).view(B, H, self.vo_dim)
        return output[:, None], weights[:, :, None]

    def _rotate(self, query, key, cos, sin):
        """Rotary embedding, Hugging Face's half layout: dimension p turns together with dimension p + P."""
        half = self.rotary_dim // 2
        cos, sin = cos[..., :half], sin[..., :half]  # (B, T, half); the stored tables repeat themselves
        if self.rotary_pairs is None:  # all pairs in place, then the dimensions that never turn
            cos, sin = cos[:, None], sin[:, None]
            return _turn(query, cos, sin, half), _turn(key, cos, sin, half)
        still = (*cos.shape[:-1], 1)
        index = self.rotary_pairs.long()
        cos = torch.cat([cos, cos.new_ones(still)], -1)[:, :, index].transpose(1, 2)  # (B, K, T, P)
        sin = torch.cat([sin, sin.new_zeros(still)], -1)[:, :, index].transpose(1, 2)
        half = self.qk_dim // 2
        key = _turn(key, cos, sin, half)
        if self.num_key_value_groups > 1:
            cos, sin = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (cos, sin))
        return _turn(query, cos, sin, half), key

    def _attend(self, query, key, value, mask, kwargs):
        """(B, T, H, V) by the attention implementation the model was loaded with."""
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager_attention)
        # Fused kernels want one width for keys and values; zeros change neither the scores nor the kept outputs. One
        # token at a time there is no T x S matrix to avoid, and padding would copy the cache.
        pad = self.qk_dim - self.vo_dim if name != "eager" and query.shape[2] > 1 else 0
        if pad > 0:
            value = nn.functional.pad(value, (0, pad))
        elif pad < 0:
            query, key = nn.functional.pad(query, (0, -pad)), nn.functional.pad(key, (0, -pad))
        options = {
            "softcap": self.softcap,
            "sliding_window": self.sliding_window,
        }
        output, weights = attention(
            self,
            query,
            key,
            value,
            mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **{k: v for k, v in options.items() if v is not None},
            **kwargs,
        )
        return output[..., : self.vo_dim], weights


def _turn(x, cos, sin, half):
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _add_alibi(alibi, mask, batch, heads, dtype):
    """Attention-with-linear-biases as an additive (B, H, 1 or T, S) mask."""
    alibi = alibi.view(batch, heads, 1, -1).to(dtype)
    if mask is None:
        return alibi
    if mask.dtype == torch.bool:
        return torch.where(mask, alibi, torch.finfo(dtype).min)
    return alibi + mask


def _masked(scores, mask, softcap):
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        return scores
    return torch.where(mask, scores, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


def _eager_attention(module, query, key, value, mask, scaling, dropout=0.0, softcap=None, **kwargs):
    """Attention by its formula; (B, T, H, V) and the weights (B, H, T, S)."""
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = _masked(query @ key.transpose(-1, -2) * scaling, mask, softcap)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


# ---------------------------------------------------------------------------------------------------------------------
# From a description to modules


def _build_linear(spec: dict, dense, config) -> nn.Module:
    return nn.Linear(spec["in"], spec["out"], bias=spec["bias"])


def _build_attention(spec: dict, dense, config) -> nn.Module:
    module = CompressedAttention(spec, config, dense.layer_idx)
    for name, theirs in spec.get("adopt", {}).items():
        if name not in ("q_norm", "k_norm"):
            raise ValueError(f"cannot adopt {name!r} into a compressed attention; allowed: q_norm, k_norm")
        setattr(module, name, getattr(dense, theirs))
    return module


def _build_latent(spec: dict, dense, config) -> nn.Module:
    return LatentLinear(spec)


_BUILDERS = {"linear": _build_linear, "latent": _build_latent, "attention": _build_attention}


def build(spec: dict, dense: nn.Module | None = None, config=None) -> nn.Module:
    """The module a description stands for; weights are uninitialised.

    Args:
        spec: ``{"kind": ..., sizes}`` as found in ``quantization_config["modules"]``.
        dense: the module it replaces, for kinds that take something over from it.
        config: the model's (text) config, for kinds that attend.

    Raises:
        ValueError: an unknown kind, or sizes that are no positive integers.
    """
    kind = spec.get("kind")
    if kind not in _BUILDERS:
        raise ValueError(
            f"unknown module kind {kind!r}; this version of rankfold reads: {', '.join(sorted(_BUILDERS))}"
        )
    for key in ("in", "out", "rank", "heads", "kv_heads", "qk_dim", "vo_dim"):
        if key in spec and not (isinstance(spec[key], int) and 0 < spec[key] < 2**31):
            raise ValueError(f"{key!r} of a {kind} module must be a positive integer, got {spec[key]!r}")
    return _BUILDERS[kind](spec, dense, config)


def install(model: nn.Module, modules: dict[str, dict]) -> None:
    """Swap the named submodules of ``model`` for the ones described, in place.

    Raises:
        ValueError: a path that is not in the model, or a description :func:`build` refuses.
    """
    config = model.config.get_text_config()
    for path, spec in modules.items():
        parent, _, name = path.rpartition(".")
        try:
            owner = model.get_submodule(parent)
            dense = getattr(owner, name)
        except AttributeError:
            raise ValueError(f"the checkpoint describes a module {path!r} that this model does not have") from None
        setattr(owner, name, build(spec, dense, config))
        owner._is_hf_initialized = True  # some families' weight init reaches into children by names that are gone now


# ---------------------------------------------------------------------------------------------------------------------
# The way in through transformers


class RankfoldConfig(QuantizationConfigMixin):
    """``quantization_config`` of a compressed checkpoint: what was done and which modules are in place."""

    def __init__(self, modules: dict | None = None, **fields):
        self.quant_method = METHOD_NAME
        self.modules = modules or {}
        self.fields = {k: v for k, v in fields.items() if k != "quant_method"}

    def to_dict(self) -> dict:
        return {"quant_method": METHOD_NAME, **self.fields, "modules": self.modules}

    def __repr__(self) -> str:
        return f"RankfoldConfig(method={self.fields.get('method')!r}, {len(self.modules)} modules)"


class RankfoldQuantizer(HfQuantizer):
    """Rebuilds the compressed structure between "model created" and "weights loaded"."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model, **kwargs):
        written = self.quantization_config.fields.get("format")
        if written != FORMAT:
            raise ValueError(
                f"this checkpoint has rankfold format {written!r}, this version reads {FORMAT}; "
                "upgrade rankfold, or load with trust_remote_code=True to use the code beside the weights"
            )
        with torch.device("meta"):
            install(model, self.quantization_config.modules)

    def _process_model_after_weight_loading(self, model, **kwargs):
        attach(model, self.quantization_config, self)
        return model

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return True

    @property
    def is_compileable(self):
        return True


def attach(model, config, quantizer: RankfoldQuantizer | None = None) -> None:
    """Make ``save_pretrained`` of a model whose modules are installed write a checkpoint that loads again.

    Args:
        model: compressed model.
        config: its description, a :class:`RankfoldConfig` or the dict of one.
    """
    if isinstance(config, dict):
        config = RankfoldConfig(**config)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer or RankfoldQuantizer(config)
    # It is an ordinary float model: .half(), .to() and training must not be refused as for integer weights.
    model.is_quantized = False
    model.config._is_quantized = False
    model.save_pretrained = functools.partial(_save_with_code, model)


def _save_with_code(model, save_directory, *args, **kwargs):
    """``save_pretrained`` that also puts this file beside the weights, where ``auto_map`` looks for it."""
    model.config.auto_map = {"AutoModelForCausalLM": f"{CODE_FILE.removesuffix('.py')}.RankfoldForCausalLM"}
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    target = os.path.join(save_directory, CODE_FILE)
    if os.path.isdir(save_directory) and os.path.abspath(__file__) != os.path.abspath(target):
        shutil.copyfile(__file__, target)


class RankfoldForCausalLM:
    """Entry point of ``trust_remote_code=True``: hands over to the stock class of the model type."""

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Called by transformers on remote classes; the stock class stays registered."""

    @classmethod
    def from_pretrained(cls, path, *args, config=None, **kwargs):
        stock = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
        return stock.from_pretrained(path, *args, config=config, **kwargs)


if METHOD_NAME not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(METHOD_NAME)(RankfoldConfig)
    register_quantizer(METHOD_NAME)(RankfoldQuantizer)
