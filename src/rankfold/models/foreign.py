"""Name the formats of models that rankfold does not read, by the names of their files."""

import re

DENSE = "give the transformers checkpoint it was made from"
OF_TRAINER = re.compile(r"training_args\.bin|(optimizer|scheduler|rng_state|scaler|random_states).*")  # not weights
TRAINER = "the state of a trainer"
# Names of files, or of folders with a slash behind them; what such a thing is; what to do. The most particular first.
KINDS = (
    (r"model_index\.json", "a diffusers pipeline", "give the folder of a language model in it, such as text_encoder"),
    (
        r"zero_to_fp32\.py|global_step\d+/|(bf16_)?zero_pp_rank_.*|mp_rank_\d+.*",
        "a DeepSpeed checkpoint in shards",
        "join them with `python zero_to_fp32.py FOLDER OUT --safe_serialization`, "
        "beside the model's config.json and tokenizer",
    ),
    (
        r".*\.distcp|pytorch_model_fsdp.*",
        "an FSDP checkpoint in shards",
        "join them with `accelerate merge-weights FOLDER OUT`, beside the model's config.json and tokenizer",
    ),
    (
        r"consolidated.*\.(safetensors|pth)|params\.json",
        "a model in its maker's own format",
        "give its transformers version, or convert it with the convert_..._weights_to_hf.py of transformers",
    ),
    (r".*\.nemo|model_weights/", "a NeMo checkpoint", "export it to transformers with NeMo (export_ckpt, target='hf')"),
    (r"lit_model\.(pth|safetensors)", "a LitGPT checkpoint", "convert it with `litgpt convert_from_litgpt`"),
    (r"weights\.(\d+\.)?(npz|safetensors)", "an MLX model", DENSE),
    (
        r".*\.(onnx|tflite|engine|plan|pte|mlmodel|llamafile)|openvino_model.*|.*\.(mlpackage|mlmodelc)/",
        "a model compiled for an engine",
        DENSE,
    ),
    (
        r"tf_model.*\.h5|.*\.(h5|keras)|saved_model\.pb|.*\.ckpt\.(index|data-.*)|flax_model.*\.msgpack",
        "weights of TensorFlow or Flax",
        "take its PyTorch weights, or convert it with from_pretrained(..., "
        "from_tf=True or from_flax=True) of transformers 4",
    ),
    (r"(source_|target_|shared_)?vocabulary\.(json|txt)", "a CTranslate2 model", DENSE),
    (r"ggml-.*\.bin", "a GGML file", DENSE),
    (
        r".*\.(bin|pt|pth|ckpt|pkl|pickle)(\.index\.json)?",
        "pickled weights",
        "rankfold reads safetensors and GGUF only (a pickle may run code): if you trust them, load them with "
        "transformers and write them with save_pretrained",
    ),
    (r".*\.(zip|tar|t?gz|tgz|bz2|xz|7z|zst|rar)", "an archive", "unpack it and give the folder that has config.json"),
    (r"optimizer.*|trainer_state\.json", TRAINER, "give a folder that has the weights too"),
)


def foreign_kind(names: list[str]) -> tuple[str, str, str] | None:
    """Return which format names of files belong to: one of the names, what it is, and what to do; ``None`` where it is
    unknown.

    A folder's name has a slash behind it.
    """
    others = [name for name in names if not OF_TRAINER.fullmatch(name)]
    for kind, what, to_do in KINDS:
        found = [name for name in (others if what != TRAINER else names) if re.fullmatch(kind, name)]
        if found:
            return found[0], what, to_do
    return None
