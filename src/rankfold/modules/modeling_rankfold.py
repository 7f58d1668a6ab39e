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
import math
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

__all__ = [
    "CompressedAttention",
    "LatentLinear",
    "QuantizedTensor",
    "RankfoldConfig",
    "RankfoldForCausalLM",
    "SparseCorrection",
    "attach",
    "build",
    "install",
]

METHOD_NAME = "rankfold"
FORMAT = 1
CODE_FILE = "modeling_rankfold.py"


class QuantizedTensor(nn.Module):
    """A tensor stored as ``low + scale * code``: one scale and one low per run of ``chunk`` numbers in row-major order.

    Codes have 2 to 8 bits and are packed for every width: a code is cut into fields of 8, 4, 2 and 1 bits (7 = 4 + 2 +
    1), and as many fields of a kind as fit share a byte. Code ``i`` of ``m`` bytes lies in byte ``i mod m``, so that
    unpacking is a few shifts of whole vectors. Calling the module gives the tensor, computed in fp32 at least and
    rounded to the dtype of the scales. LatentLLM (arXiv:2505.18413), Eq. 242.
    """

    def __init__(self, shape: tuple[int, ...], bits: int, chunk: int):
        super().__init__()
        if not 2 <= bits <= 8:
            raise ValueError(f"codes must have 2 to 8 bits, got {bits}")
        self.shape, self.bits, self.chunk = tuple(shape), bits, chunk
        self.numel = math.prod(self.shape)
        size = sum(-(-self.numel // (8 // width)) for width in self.fields(bits))
        self.register_buffer("codes", torch.zeros(size, dtype=torch.uint8))
        for name in ("scale", "low"):
            self.register_buffer(name, torch.zeros(-(-self.numel // chunk)))

    @staticmethod
    def fields(bits: int) -> list[int]:
        return [width for width in (8, 4, 2, 1) if bits & width]

    @staticmethod
    def pack(codes, bits: int):
        """Bytes of ``(n,)`` uint8 codes; no more than ``bits * n / 8`` and one per field."""
        packed, shift = [], 0
        for width in QuantizedTensor.fields(bits):
            field = (codes >> shift) & (2**width - 1)
            rows = nn.functional.pad(field, (0, -len(field) % (8 // width))).view(8 // width, -1)
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
            packed.append((rows << places[:, None]).sum(0).to(torch.uint8))
            shift += width
        return torch.cat(packed)

    def unpack(self):
        """``(n,)`` uint8 codes."""
        codes, start, shift = 0, 0, 0
        for width in self.fields(self.bits):
            stop = start - (-self.numel // (8 // width))
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=self.codes.device)
            field = (self.codes[start:stop] >> places[:, None]) & (2**width - 1)
            codes = codes | (field.flatten()[: self.numel] << shift)
            start, shift = stop, shift + width
        return codes

    def forward(self):
        work = torch.promote_types(self.scale.dtype, torch.float32)
        codes = nn.functional.pad(self.unpack(), (0, -self.numel % self.chunk)).view(len(self.scale), self.chunk)
        values = self.low.to(work)[:, None] + self.scale.to(work)[:, None] * codes
        return values.flatten()[: self.numel].view(self.shape).to(self.scale.dtype)


class SparseCorrection(nn.Module):
    """``D x`` for a sparse ``D`` (out, in): values, their columns, and where every row starts.

    ``embedding_bag`` is the product: row ``o`` of the output is a weighted sum of rows of ``x^T``. It costs what the
    values cost, makes no dense ``D``, works in bf16 and fp16 on CPU and GPU, and has gradients; torch's CSR product has
    no bf16 on CPU, and a scatter into a dense matrix costs more than the layer it corrects.
    """

    def __init__(self, in_features: int, out_features: int, nonzeros: int):
        super().__init__()
        if nonzeros > in_features * out_features:
            raise ValueError(f"{nonzeros} non-zeros do not fit a ({out_features}, {in_features}) layer")
        self.values = nn.Parameter(torch.empty(nonzeros))
        self.register_buffer("columns", torch.zeros(nonzeros, dtype=_index_dtype(in_features)))
        self.register_buffer("starts", torch.zeros(out_features + 1, dtype=torch.int32))

    def forward(self, x):
        table = x.reshape(-1, x.shape[-1]).T.contiguous()  # (in, tokens)
        y = nn.functional.embedding_bag(
            self.columns.int(),
            table,
            self.starts,
            mode="sum",
            per_sample_weights=self.values.to(x.dtype),
            include_last_offset=True,
        )
        return y.T.reshape(*x.shape[:-1], -1)


class HeadIdentity(nn.Module):
    """``B`` (heads * h, rank) whose heads are ``[I | rest]`` up to an order of their own (LatentLLM Eq. 79-80).

    The identities are not stored. Calling the module gives the matrix.
    """

    def __init__(self, heads: int, head_dim: int, rank: int, spec: dict):
        super().__init__()
        if rank < head_dim:
            raise ValueError(f"a per-head identity needs rank >= {head_dim} (the head dimension), got {rank}")
        self.rest = _tensor((heads, head_dim, rank - head_dim), spec)
        self.register_buffer("order", torch.zeros(heads, rank, dtype=_index_dtype(rank)))

    def forward(self):
        rest = _value(self.rest)
        identity = torch.eye(rest.shape[1], dtype=rest.dtype, device=rest.device).expand(len(rest), -1, -1)
        back = torch.argsort(self.order.long(), -1)[:, None].expand(-1, rest.shape[1], -1)
        return torch.cat([identity, rest], -1).gather(2, back).flatten(0, 1)


def _index_dtype(size: int) -> torch.dtype:
    """The smallest of two integer types that holds an index below ``size``."""
    return torch.int16 if size <= 2**15 else torch.int32


def _tensor(shape: tuple[int, ...], spec: dict) -> nn.Parameter | QuantizedTensor:
    """A parameter, or quantised numbers where the description has ``bits``."""
    return QuantizedTensor(shape, spec["bits"], spec["chunk"]) if "bits" in spec else nn.Parameter(torch.empty(shape))


def _value(stored):
    """The tensor that a parameter is, or that a module stands for."""
    return stored() if isinstance(stored, nn.Module) else stored


class LatentLinear(nn.Module):
    """``y = B (A x) + b`` through a latent of width ``rank``; the junction decides what of ``A`` and ``B`` is stored.

    * ``plain``: ``A`` (rank, in) and ``B`` (out, rank).
    * ``block_identity_right``: ``A = [I | A_2]`` after a permutation of the inputs; the identity is neither stored nor
      multiplied: ``z = x[p_1] + A_2 x[p_2]``. Stores ``rank * (out + in - rank)`` numbers, fewer than ``out * in``.
    * ``block_identity_left``: the mirror, ``y[q_1] = z``, ``y[q_2] = B_2 z``.
    * ``lu``: ``B`` unit lower, ``A`` upper trapezoidal; only the entries that are not fixed are stored.

    What is stored of ``A`` and ``B`` may be quantised (``bits``, ``chunk``), ``B`` may have an identity in every head
    (``head_identity`` heads), and ``nonzeros`` adds a sparse correction: ``y = B (A x) + D x + b``.

    LatentLLM (arXiv:2505.18413), Sec. 3.3 and App. A.2, I.
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
        self.A = _tensor(A, spec)
        if heads := spec.get("head_identity"):
            self.B = HeadIdentity(heads, self.out_features // heads, self.rank, spec)
        else:
            self.B = _tensor(B, spec)
        count = spec.get("nonzeros")
        self.sparse = SparseCorrection(self.in_features, self.out_features, count) if count else None
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
        A = _value(self.A)
        if self.form == "block_identity_right":
            x = x[..., self.columns.long()]
            return x[..., : self.rank] + nn.functional.linear(x[..., self.rank :], A)
        if self.form == "lu":
            return nn.functional.linear(x[..., self.columns.long()], self._upper(A))
        return nn.functional.linear(x, A)

    def up(self, z, bias=True):
        """``(..., rank) -> (..., out)``."""
        b, B = self.bias if bias else None, _value(self.B)
        if self.form == "block_identity_left":
            y = torch.cat([z, nn.functional.linear(z, B)], -1)[..., torch.argsort(self.rows.long())]
            return y if b is None else y + b.to(y.dtype)  # under autocast biases stay fp32
        if self.form == "lu":
            y = nn.functional.linear(z, self._lower(B))[..., torch.argsort(self.rows.long())]
            return y if b is None else y + b.to(y.dtype)
        return nn.functional.linear(z, B, b)

    def up_matrix(self):
        """Dense ``(out, rank)`` of :meth:`up`, without the bias."""
        B = _value(self.B)
        if self.form in ("plain", "block_identity_right"):
            return B
        return self.up(torch.eye(self.rank, dtype=B.dtype, device=B.device), bias=False).T

    def forward(self, x):
        y = self.up(self.down(x))
        return y if self.sparse is None else y + self.sparse(x).to(y.dtype)

    def _upper(self, A):
        full = A.new_zeros(self.rank, self.in_features)
        i, j = torch.triu_indices(self.rank, self.in_features, device=A.device)
        return full.index_put((i, j), A)

    def _lower(self, B):
        full = torch.eye(self.out_features, self.rank, dtype=B.dtype, device=B.device)
        i, j = torch.tril_indices(self.out_features, self.rank, -1, device=B.device)
        return full.index_put((i, j), B)


class SplitHeadLinear(nn.Module):
    """``y_i = B_i (A_i x) + b_i``: a low rank of its own for every head of the output (LatentLLM App. D).

    ``plain``: ``A`` (heads * rank, in), ``B`` (heads, h, rank). ``block_identity_left``: every ``B_i`` has an identity
    after a permutation of the head's outputs, which is neither stored nor multiplied.
    """

    def __init__(self, spec: dict):
        super().__init__()
        self.heads, self.rank, self.form = spec["heads"], spec["rank"], spec["form"]
        if self.form not in ("plain", "block_identity_left"):
            raise ValueError(f"unknown form {self.form!r} of a split-head layer")
        head_dim, fixed = spec["out"] // self.heads, self.rank if self.form == "block_identity_left" else 0
        if self.rank > min(head_dim, spec["in"]):
            raise ValueError(f"rank {self.rank} of heads ({head_dim}, {spec['in']}) is too large")
        self.A = _tensor((self.heads * self.rank, spec["in"]), spec)
        self.B = _tensor((self.heads, head_dim - fixed, self.rank), spec)
        self.bias = nn.Parameter(torch.empty(spec["out"])) if spec["bias"] else None
        if fixed:
            self.register_buffer("rows", torch.zeros(spec["out"], dtype=torch.int32))

    def forward(self, x):
        z = nn.functional.linear(x, _value(self.A)).unflatten(-1, (self.heads, self.rank))
        y = torch.einsum("...hr,hor->...ho", z, _value(self.B))  # (..., heads, h or h - rank)
        if self.form == "block_identity_left":
            y = torch.cat([z, y], -1).flatten(-2)[..., torch.argsort(self.rows.long())]
        else:
            y = y.flatten(-2)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class LatentRows:
    """Some outputs of a :class:`LatentLinear` as if they were a layer of their own: keys or values of a shared latent."""

    def __init__(self, shared: LatentLinear, start: int, stop: int):
        self.shared, self.rows = shared, slice(start, stop)

    @property
    def bias(self):
        return None if self.shared.bias is None else self.shared.bias[self.rows]

    def up(self, z):
        return nn.functional.linear(z, self.up_matrix(), self.bias)

    def up_matrix(self):
        return self.shared.up_matrix()[self.rows]


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
        self.o_proj = build(spec["o"])
        self.qkv_proj = build(spec["qkv"]) if "qkv" in spec else None  # one latent that all three share
        if self.qkv_proj is None:
            self.q_proj, self.k_proj, self.v_proj = (build(spec[name]) for name in ("q", "k", "v"))
        else:
            self.widths = (self.heads * self.qk_dim, self.kv_heads * self.qk_dim, self.kv_heads * self.vo_dim)
            q, k, v = self.widths
            self.k_proj, self.v_proj = LatentRows(self.qkv_proj, q, q + k), LatentRows(self.qkv_proj, q + k, q + k + v)
        # Which side caches its latent instead of heads: keys only where nothing rotates or normalises them afterwards.
        self.latent_keys, self.latent_values = "k" in spec.get("latent_cache", ()), "v" in spec.get("latent_cache", ())
        self.one_latent = self.qkv_proj is not None and self.latent_keys  # cached once, as keys; values are empty
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
        query, key, value = self._project(hidden_states)
        query = query.view(B, T, self.heads, self.qk_dim)
        if self.q_norm is not None:
            query = self.q_norm(query)
        query = query.transpose(1, 2)  # (B, H, T, R)
        key = key[:, None] if self.latent_keys else self._keys(key)  # (B, 1, T, latent) or (B, K, T, R)
        if self.rotary_dim:
            query, key = self._rotate(query, key, *position_embeddings)
        value = value[:, None] if self.latent_values else self._values(value)

        cache = past_key_values if past_key_values is not None else layer_past
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.one_latent:
            value = key
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

    def _project(self, x):
        """Queries; keys and values or, where those are cached, their latents; all (B, T, width)."""
        if self.qkv_proj is None:
            key = self.k_proj.down(x) if self.latent_keys else self.k_proj(x)
            value = self.v_proj.down(x) if self.latent_values else self.v_proj(x)
            return self.q_proj(x), key, value
        if not self.latent_values:
            return self.qkv_proj(x).split(self.widths, -1)
        z = self.qkv_proj.down(x)
        query, key, _ = self.qkv_proj.up(z).split(self.widths, -1)
        return (query, z, z[..., :0]) if self.one_latent else (query, key, z)

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
        groups = query.unflatten(1, (self.kv_heads, -1))  # the queries of a group turn as their key
        query = _turn(groups, cos[:, :, None], sin[:, :, None], half).flatten(1, 2)
        return query, _turn(key, cos, sin, half)

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


def _build_split_head(spec: dict, dense, config) -> nn.Module:
    return SplitHeadLinear(spec)


_BUILDERS = {
    "linear": _build_linear,
    "latent": _build_latent,
    "split_head": _build_split_head,
    "attention": _build_attention,
}
_SIZES = ("in", "out", "rank", "heads", "kv_heads", "qk_dim", "vo_dim", "bits", "chunk", "nonzeros", "head_identity")


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
    for key in _SIZES:
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
