"""Things to do to JSON, to bytes, to settings and to tensors."""

import json
import random

import torch
from safetensors.torch import load, save

VALUES = [None, True, -1, 0, 1, 2**31, 2**70, 0.5, -1e300, "", "x", "x" * 5000, "[bold]", "\ud800", "../..", "nan"]
VALUES += [[], {}, [[]], [None], {"": None}]


def places(value, path=()):
    """Paths to everything in a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutate_value(value, rng: random.Random) -> str:
    """Change one place of a JSON object; what was done."""
    path = rng.choice([p for p in places(value) if p])
    for key in path[:-1]:
        value = value[key]
    key, where = path[-1], ".".join(map(str, path))
    what = rng.choice(["remove", "replace", "replace", "wrap", "rename"])
    if what == "remove" or (what == "rename" and isinstance(value, list)):
        del value[key]
    elif what == "replace":
        value[key] = rng.choice(VALUES)
        return f"{where} = {str(value[key])[:20]!a}"
    elif what == "wrap":
        value[key] = [value[key]]
    else:
        value[f"{key}x"] = value.pop(key)
    return f"{what} {where}"


def mutate_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damage a file as disks, copies and people do; what was done."""
    at = rng.randrange(max(1, len(content)))
    bit = bytes([content[at] ^ 1 << rng.randrange(8)]) if content else b""
    kinds = {
        f"cut at {at}": content[:at],
        "empty": b"",
        f"bit of byte {at}": content[:at] + bit + content[at + 1 :],
        f"zeros from {at}": content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :],
        "header": rng.randbytes(8) + content[8:],
        "huge header": (2**63 - 1).to_bytes(8, "little") + content[8:],
        "appended": content + b"\0" * 7,
        "rubbish": rng.randbytes(64),
        "text": b"<html>404</html>",
    }
    what = rng.choice(sorted(kinds))
    return kinds[what], what


def mutate_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change one to three values, or what the text is."""
    if rng.random() < 0.2:
        text = rng.choice(
            [b"[]", b"5", b"null", b"{}", b"\xff\xfe{}", b'{"a": ' * 5000, b'{"a": NaN}', b'{"a": 1}{"b": 2}']
        )
        return text, repr(text[:20])
    value = json.loads(content)
    done = [mutate_value(value, rng) for _ in range(rng.choice([1, 1, 2, 3])) if value]
    return json.dumps(value).encode(), "; ".join(done)


SETTINGS = {
    "num_hidden_layers": [0, 1, 3],
    "num_attention_heads": [1, 2, 8, 3],
    "num_key_value_heads": [1, 4, 3],
    "head_dim": [4, 16],
    "hidden_size": [16, 64],
    "intermediate_size": [24, 96],
    "vocab_size": [96, 399, 401],
    "max_position_embeddings": [1, 8, 10**9],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "hidden_act": ["gelu", "relu", "silly"],
    "rms_norm_eps": [1e-5, 1.0, -1.0],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "x"},
        {"rope_theta": 9.0},
    ],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "partial_rotary_factor": [0.5],
    "sliding_window": [2],
    "layer_types": [["sliding_attention", "full_attention"], ["x"]],
    "dtype": ["float16", "bfloat16", "float64", "int8", "float8_e4m3fn"],
    "model_type": ["mistral", "gemma", "qwen2", "phi", "opt", "bert", "x"],
    "architectures": [["MistralForCausalLM"], ["LlamaModel"], []],
    "quantization_config": [{}, {"quant_method": "rankfold", "format": 1, "modules": {}}, {"quant_method": "gptq"}],
    "auto_map": [{"AutoConfig": "x.X", "AutoModelForCausalLM": "x.X"}],
}


def mutate_settings(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change what a config says of the model: a setting, or the description of a compressed module."""
    value = json.loads(content)
    modules = value.get("quantization_config", {}).get("modules")
    if modules and rng.random() < 0.6:
        module = rng.choice(sorted(modules))
        path, what = rng.choice([p for p in places(modules[module]) if p]), rng.choice(["replace", "replace", "remove"])
        part = modules[module]
        for key in path[:-1]:
            part = part[key]
        old = part.pop(path[-1])
        if what == "replace":
            part[path[-1]] = _near(old, rng)
        return json.dumps(
            value
        ).encode(), f"{module}.{'.'.join(map(str, path))}: {old!r:.20} -> {part.get(path[-1], '-')!r:.20}"
    key = rng.choice(sorted(set(SETTINGS) | set(value)))
    old = value.pop(key, None)
    if key in SETTINGS and rng.random() < 0.7:
        value[key] = rng.choice(SETTINGS[key])
    return json.dumps(value).encode(), f"{key}: {str(old)[:20]!a} -> {str(value.get(key, '-'))[:40]!a}"


def _near(value, rng: random.Random):
    """Another value that might be one of this place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 2 * value, value // 2, -value])
    if isinstance(value, float):
        return rng.choice([2 * value, value / 2, -value, 0.0])
    if isinstance(value, str):
        return rng.choice(["linear", "latent", "sparse", "plain", "lu", "k", "v", "kv", ""])
    return {} if value is None else None


def mutate_tensors(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change which tensors there are, or one of them."""
    tensors = load(content)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    what = rng.choice(["remove", "rename", "no prefix", "more", "shape", "type", "type", "value", "swap", "block"])
    if what == "remove":
        del tensors[name]
    elif what == "rename":
        other = rng.choice(
            [name + "x", name.replace(".0.", ".1."), name.replace(".1.", ".7."), name.removeprefix("model.")]
        )
        tensors[other] = tensors.pop(name)
        what = f"named {other}"
    elif what == "no prefix":
        tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    elif what == "more":
        what = rng.choice(
            ["lm_head.weight", "lm_head.bias", "model.layers.1.self_attn.q_proj.bias", "x", "model.layers.9.x"]
        )
        tensors[what] = torch.ones(tensors.get("model.embed_tokens.weight", tensor).shape)
        what = f"and {what}"
    elif what == "shape":
        tensors[name] = rng.choice(
            [
                tensor.flatten(),
                tensor.mT.contiguous() if tensor.dim() > 1 else tensor[1:],
                tensor[:-1],
                tensor[None],
                tensor[:0],
            ]
        )
    elif what == "type":
        dtype = rng.choice(["float16", "bfloat16", "float64", "int64", "int8", "bool", "complex64", "float8_e4m3fn"])
        tensors[name], what = tensor.to(getattr(torch, dtype)), dtype
    elif what == "value" and tensor.is_floating_point():
        what = rng.choice(["nan", "inf", "1e38"])
        tensors[name].view(-1)[rng.randrange(tensor.numel())] = float(what)
    elif what == "value":
        what = rng.choice([-1, 0, 120])
        tensors[name].view(-1)[rng.randrange(tensor.numel())] = what
    elif what == "swap":
        other = rng.choice([key for key in sorted(tensors) if tensors[key].shape == tensor.shape])
        tensors[name], tensors[other] = tensors[other], tensor
        what = f"swapped with {other}"
    else:
        tensors = {key: tensor for key, tensor in tensors.items() if ".0." not in key}
    return save(tensors, {"format": "pt"}), f"{name}: {what}"
