"""What a folder or file is, is decided once: of no readable model all commands and the API say the same."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import rankfold
from rankfold.errors import RankfoldError
from rankfold.evaluation.cost import bytes_on_disk
from rankfold.models.given import resolve_model
from saved import save_text, save_tiny

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
UP = "model.layers.1.mlp.up_proj"


def files(*names, without=(), **contents):
    """A copy of the model with empty files of these names; ``without``: what is taken away."""

    def make(folder: Path) -> None:
        for name in without:
            (folder / name).unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_bytes(b"")
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_bytes(content)

    return make


ALL = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = ("model.safetensors",)


def alone(*names):
    return files(*names, without=ALL)


def instead(*names):
    """In place of the weights."""
    return files(*names, without=WEIGHTS)


def pointer(name: str):
    return lambda folder: (folder / name).write_bytes(POINTER)


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "owner/base", "peft_type": "LORA"})
    )
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")


def configured(**fields):
    def make(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return make


def tensors(edit):
    def make(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        save_file(edit(state), folder / "model.safetensors", metadata={"format": "pt"})

    return make


def in_place_of_up(**others):
    """The matrix goes, and these come beside its place."""
    others = {f"{UP}.{name}": tensor for name, tensor in others.items()}
    return tensors(lambda state: {n: x for n, x in state.items() if n != f"{UP}.weight"} | others)


def beside_up(name: str, tensor, weight=torch.float8_e4m3fn):
    def edit(state):
        return state | {f"{UP}.weight": state[f"{UP}.weight"].to(weight), f"{UP}.{name}": tensor}

    return tensors(edit)


def named(change):
    return tensors(lambda state: {change(name): tensor for name, tensor in state.items()})


def moved(*into: str):
    """The whole model in folders below."""

    def make(folder: Path) -> None:
        for name in into:
            shutil.copytree(folder, folder.parent / "aside")
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder.parent / "aside").rename(folder / name)
        for name in ALL:
            (folder / name).unlink(missing_ok=True)

    return make


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/abc")


def shards_without_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def missing_shards(folder: Path) -> None:
    shards_without_index(folder)
    names = dict.fromkeys(load_file(folder / "model-00001-of-00001.safetensors"), "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.zip", "w") as handle:
        handle.writestr("config.json", "{}")
    for name in ALL:
        (folder / name).unlink()


ONE, FEW = torch.ones(1), torch.ones(4, 4, dtype=torch.int32)
FOLDERS = {  # name -> what is done to a copy of a model, and what is said
    "empty": (alone(), "is empty; give a folder that has config.json and model.safetensors"),
    "nothing-known": (alone("notes.txt"), r"has no config.json; it has notes.txt; give a folder that has config.json"),
    "adapter-beside": (
        adapter,
        r"has an adapter of owner/base next to the model \(adapter_config.json\); move the adapter",
    ),
    "adapter-alone": (
        lambda folder: (adapter(folder), alone()(folder)),
        r"is an adapter of owner/base without a model; merge it with peft \(model = PeftModel."
        r"from_pretrained\(base, ad",
    ),
    "pointer-weights": (
        pointer("model.safetensors"),
        r"model.safetensors is a git-lfs pointer, not .*; run `git lfs pull`",
    ),
    "pointer-config": (pointer("config.json"), r"config.json is a git-lfs pointer"),
    "pointer-tokenizer": (pointer("tokenizer.json"), r"tokenizer.json is a git-lfs pointer"),
    "pointer-pickle": (files(without=WEIGHTS, pytorch_model__bin=POINTER), r"pytorch_model.bin is a git-lfs pointer"),
    "web-page": (
        files(config__json=b"<!DOCTYPE html><html>"),
        r"config.json is a web page, not the file itself; download",
    ),
    "dangling-link": (
        dangling,
        r"model.safetensors is a link to a file that is not there; copy its folder with `cp -rL`",
    ),
    "no-config": (
        files(without=("config.json",)),
        r"has weights and no config.json; put the model's config.json next to",
    ),
    "no-weights": (
        instead(),
        r"has no model.safetensors; it has config.json, .*; give a folder that has config.json and",
    ),
    "no-index": (
        shards_without_index,
        r"no model.safetensors.index.json, and other safetensors \(model-00001-of-00001",
    ),
    "other-name": (
        instead("weights_fp16.safetensors"),
        r"other safetensors \(weights_fp16.safetensors\); add the index of",
    ),
    "missing-shards": (
        missing_shards,
        r"lacks model-00002-of-00002.safetensors named by its index; download or copy it",
    ),
    "pickle": (
        instead("pytorch_model.bin", "training_args.bin"),
        r"pytorch_model.bin is pickled weights: rankfold reads sa",
    ),
    "pickles": (instead("pytorch_model.bin.index.json"), r"pickled weights: .*a pickle may run code"),
    "torch-file": (alone("model.pth"), r"has no config.json; model.pth is pickled weights"),
    "lightning": (alone("last.ckpt"), r"last.ckpt is pickled weights"),
    "trainer-state": (
        instead("optimizer.pt", "trainer_state.json"),
        r"optimizer.pt is the state of a trainer: give a folder",
    ),
    "tensorflow": (
        instead("tf_model.h5"),
        r"tf_model.h5 is weights of TensorFlow or Flax: take its PyTorch weights, or",
    ),
    "flax": (instead("flax_model.msgpack"), r"flax_model.msgpack is weights of TensorFlow or Flax"),
    "onnx": (
        instead("model.onnx"),
        r"model.onnx is a model compiled for an engine: give the transformers checkpoint it was",
    ),
    "openvino": (
        instead("openvino_model.bin", "openvino_model.xml"),
        r"openvino_model.bin is a model compiled for an engi",
    ),
    "tensorrt": (instead("rank0.engine"), r"rank0.engine is a model compiled for an engine"),
    "ctranslate2": (instead("model.bin", "vocabulary.json"), r"vocabulary.json is a CTranslate2 model"),
    "one-gguf": (instead("a.gguf"), r"has no model.safetensors, and GGUF files \(a.gguf\); give one file, .*a.gguf$"),
    "ggufs": (
        alone("b.gguf", "a.gguf"),
        r"has no config.json, and GGUF files \(a.gguf, b.gguf\); give one file, .*a.gguf$",
    ),
    "diffusers": (
        alone("model_index.json", "unet/config.json"),
        r"model_index.json is a diffusers pipeline: give the fold",
    ),
    "diffusers-part": (
        configured(_diffusers_version="0.30", _class_name="UNet"),
        r"is a part of a diffusers pipeline; give",
    ),
    "sentences": (
        moved("0_Transformer"),
        r"has no config.json, and folders in it have; give .*sentences/0_Transformer$",
    ),
    "unpacked": (moved("model"), r"has no config.json, and folders in it have; give .*unpacked/model$"),
    "hub-cache": (moved("snapshots/abc"), r"have; give .*hub-cache/snapshots/abc$"),
    "checkpoints": (
        moved("checkpoint-1000", "checkpoint-500"),
        r"have; give .*checkpoints/checkpoint-500 or .*checkpoints/checkpoint-1000$",
    ),
    "deepspeed": (
        instead("zero_to_fp32.py", "latest", "global_step5/x"),
        r"is a DeepSpeed checkpoint in shards: join them",
    ),
    "fsdp": (
        instead("pytorch_model_fsdp_0/__0_0.distcp"),
        r"pytorch_model_fsdp_0/ is an FSDP checkpoint in shards: join t",
    ),
    "distcp": (alone("__0_0.distcp", ".metadata"), r"__0_0.distcp is an FSDP checkpoint in shards"),
    "mistral": (
        alone("consolidated.safetensors", "params.json"),
        r"consolidated.safetensors is a model in its maker's own",
    ),
    "meta": (
        alone("consolidated.00.pth", "params.json"),
        r"consolidated.00.pth is a model in its maker's own format: give",
    ),
    "nemo": (alone("model.nemo"), r"model.nemo is a NeMo checkpoint: export it to transformers with NeMo"),
    "litgpt": (instead("lit_model.pth"), r"lit_model.pth is a LitGPT checkpoint"),
    "mlx-old": (instead("weights.npz"), r"weights.npz is an MLX model"),
    "archive": (archive, r"model.zip is an archive: unpack it and give the folder that has config.json"),
    "mlx": (
        configured(quantization={"bits": 4, "group_size": 64}),
        r"is a quantised model of MLX; start from the dense",
    ),
    "fp8": (
        beside_up("weight_scale", ONE),
        r"quantised \(float8 or int8 with scales: model.layers.1.mlp.up_proj.weight_sca",
    ),
    "fp8-blocks": (
        beside_up("weight_scale_inv", ONE),
        r"quantised \(float8 or int8 with scales: .*weight_scale_inv\), and i",
    ),
    "fp8-plain": (beside_up("extra", ONE), r"quantised \(F8_E4M3: model.layers.1.mlp.up_proj.weight\)"),
    "int8": (beside_up("weight_scale", ONE, torch.int8), r"quantised \(float8 or int8 with scales: .*weight_scale\)"),
    "int8-other": (
        beside_up("my_scales", ONE, torch.int8),
        r"quantised \(I8: model.layers.1.mlp.up_proj.weight\), and its c",
    ),
    "bnb8": (beside_up("SCB", ONE, torch.int8), r"quantised \(bitsandbytes: model.layers.1.mlp.up_proj.SCB\)"),
    "bnb4": (beside_up("weight.absmax", ONE, torch.uint8), r"quantised \(bitsandbytes: .*up_proj.weight.absmax\)"),
    "gptq": (
        in_place_of_up(qweight=FEW, qzeros=FEW + 1, scales=ONE),
        r"quantised \(GPTQ or AWQ: .*up_proj.q\w+\), and its",
    ),
    "packed": (
        in_place_of_up(weight_packed=FEW, weight_scale=ONE),
        r"quantised \(compressed-tensors: .*weight_packed\)",
    ),
    "mxfp4": (
        in_place_of_up(gate_up_proj_blocks=FEW, gate_up_proj_scales=ONE),
        r"quantised \(MXFP4: .*gate_up_proj_blocks\)",
    ),
    "hqq": (in_place_of_up(W_q=FEW, scale=ONE), r"quantised \(HQQ: .*up_proj.W_q\)"),
    "data-parallel": (
        named(lambda n: f"module.{n}"),
        r"wrapped by DataParallel, DDP or DeepSpeed \(module.lm_head.weight\)",
    ),
    "compiled": (named(lambda n: f"_orig_mod.{n}"), r"was compiled by torch.compile \(_orig_mod\..*; give or save the"),
    "compiled-block": (
        named(lambda n: n.replace("layers.1.", "layers.1._orig_mod.")),
        r"was compiled by torch.compile",
    ),
    "peft-saved": (
        named(lambda n: f"base_model.model.{n}"),
        r"is wrapped by peft, its adapter not merged \(base_model.model",
    ),
    "unmerged": (
        named(lambda n: n.replace("up_proj.", "up_proj.base_layer.")),
        r"is wrapped by peft, its adapter not merged \(.*up_proj.base_layer.weight\); merge it with peft",
    ),
    "fsdp-names": (named(lambda n: f"_fsdp_wrapped_module.{n}"), r"was wrapped by FSDP or by activation checkpointing"),
    "zero-3": (
        tensors(lambda state: dict.fromkeys(state, ONE[:0])),
        r"12 tensors without entries|without entries .* ZeRO-3",
    ),
}


FILES = {  # name of a file -> its content, and what is said
    "config.json": (b"{}", r"config.json is one file of a checkpoint; give its folder"),
    "model.safetensors": (b"", r"model.safetensors is one file of a checkpoint; give its folder"),
    "pointer.gguf": (POINTER, r"pointer.gguf is a git-lfs pointer"),
    "a-00001-of-00002.gguf": (b"GGUF", r"is part 1 of 2; join them with `llama-gguf-split --merge` and give the whole"),
    "sha256-abc": (b"GGUF\x03", r"sha256-abc is a GGUF file under another suffix than .gguf; rename it"),
    "model.GGUF": (b"GGUF", r"model.GGUF is a GGUF file under another suffix than .gguf; rename it"),
    "model.zip": (b"PK", r"model.zip is an archive; unpack it"),
    "model.tar.gz": (b"", r"model.tar.gz is an archive; unpack it"),
    "model.nemo": (b"", r"model.nemo is a NeMo checkpoint; export it"),
    "pytorch_model.bin": (b"", r"pytorch_model.bin is pickled weights; rankfold reads safetensors and GGUF only"),
    "model.onnx": (b"", r"model.onnx is a model compiled for an engine"),
    "notes.md": (b"hello", r"notes.md is neither a folder nor a .gguf file; give the folder that has config.json"),
}
UNREAD = {"exl2": {"quant_method": "exl2"}, "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"}}
for method, fields in UNREAD.items():
    message = rf"is quantised \({method}\), which transformers does not read; start from the dense model"
    FOLDERS[method] = (configured(quantization_config=fields), message)
THINGS = {
    **{name: message for name, (_, message) in FOLDERS.items()},
    **{f"files/{n}": m for n, (_, m) in FILES.items()},
}
CALLS = {
    "resolve_model": resolve_model,
    "open_model": lambda path: rankfold.open_model(path, device="cpu"),
    "load": lambda path: rankfold.load(path, device="cpu"),
    "export": lambda path: rankfold.export(path, path.parent / "out"),
    "evaluate_text": lambda path: rankfold.evaluate_text(path, "text.txt"),
    "bytes_on_disk": bytes_on_disk,
}
COMMANDS = (
    "compress {} -o out --calibration text.txt",
    "calibrate {} -o out --calibration text.txt",
    "plan {}",
    "models {}",
    "compare {} --methods modegpt --sparsities 0.1 --text text.txt -o out --calibration text.txt",
    "evaluate {} --text text.txt --max-length 32",
    "evaluate {} --speed",
    "evaluate model --speed --baseline {}",
    "generate {} hello",
    "export {} -o out",
    "inspect {}",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("things")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    for name, (make, _) in FOLDERS.items():
        shutil.copytree(folder / "model", folder / name)
        make(folder / name)
    (folder / "files").mkdir()
    for name, (content, _) in FILES.items():
        (folder / "files" / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("thing", THINGS)
def test_every_function_says_what_it_is(place, thing, monkeypatch, subtests):
    monkeypatch.chdir(place)
    for name, call in CALLS.items():
        with subtests.test(call=name):
            with pytest.raises(RankfoldError, match=THINGS[thing]) as caught:
                call(place / thing)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["student.", "a.b."])
@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_a_prefix_of_all_names_is_named(place, tmp_path, use, prefix):
    """Whether names have one shows where the model is known."""
    shutil.copytree(place / "model", tmp_path / "prefixed")
    named(lambda n: prefix + n)(tmp_path / "prefixed")
    with pytest.raises(RankfoldError, match=f"prefixed has '{prefix}' before the names of all weights; take it off"):
        use(tmp_path / "prefixed", device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_a_checkpoint_without_a_language_model_head_says_what_it_was_saved_as(place, tmp_path, use):
    t.LlamaModel.from_pretrained(place / "model").save_pretrained(tmp_path / "other")
    with pytest.raises(
        RankfoldError, match=r"saved as LlamaModel and lacks lm_head.weight, which LlamaForCausalLM has; g"
    ):
        use(tmp_path / "other", device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_a_decoder_with_another_head_is_refused_and_does_not_lose_it(place, tmp_path, use, kind, subtests):
    """With a tied embedding nothing is missing for a language model, so only the saved class tells."""
    for tied in (True, False):
        with subtests.test(tied=tied):
            model = getattr(t, f"LlamaFor{kind}").from_pretrained(place / "model", tie_word_embeddings=tied)
            model.save_pretrained(tmp_path / str(tied))
            with pytest.raises(
                RankfoldError, match=rf"^LlamaFor{kind} has no language-model head, .*saved as LlamaForCausalLM$"
            ):
                use(tmp_path / str(tied), device="cpu")


@pytest.mark.parametrize("use", [rankfold.open_model, rankfold.load])
def test_a_folder_under_the_suffix_of_a_file_is_a_folder(place, tmp_path, use):
    shutil.copytree(place / "model", tmp_path / "model.gguf")
    use(tmp_path / "model.gguf", device="cpu")


REPOSITORIES = {  # files -> what is said
    (
        "config.json",
        "pytorch_model.bin",
    ): r"owner/name has no model.safetensors; pytorch_model.bin is pickled weights: rankf",
    (
        "README.md",
        "a-Q4.gguf",
        "a-Q8.gguf",
    ): r"GGUF files \(a-Q4.gguf, a-Q8.gguf\); give one file, what `hf download owner/na",
    (
        "adapter_config.json",
        "adapter_model.safetensors",
    ): r"owner/name is an adapter without a model; merge it with peft",
    (
        "model_index.json",
        "unet/config.json",
    ): r"owner/name has no config.json; model_index.json is a diffusers pipeline",
    (
        "params.json",
        "consolidated.00.pth",
    ): r"owner/name has no config.json; consolidated.00.pth is a model in its maker's o",
    (
        "v1/config.json",
        "v1/model.safetensors",
        "README.md",
    ): r"folders in it have; give what `hf download owner/name --incl",
    (): r"owner/name is empty",
}


@pytest.mark.parametrize("listed", REPOSITORIES)
@pytest.mark.parametrize("name, revision", [("owner/name", None), ("owner/name@v2", "v2")])
def test_a_repository_of_the_hub_is_what_its_files_are(tmp_path, monkeypatch, listed, name, revision):
    """Only what is read is downloaded, so the hub is asked what else there is."""

    def download(repository, **options):
        for file in listed:
            if file.endswith(".json") and "/" not in file:
                (tmp_path / file).write_text("{}")
        return str(tmp_path)

    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files", lambda self, *a, **k: asked.append((a, k)) or list(listed)
    )
    message = REPOSITORIES[listed].replace("owner/name", name)
    with pytest.raises(RankfoldError, match=message):
        resolve_model(name)
    assert asked == [(("owner/name",), {"revision": revision})]


def test_a_whole_snapshot_is_not_asked_about(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(place / "model"))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *a, **k: pytest.fail("asked"))
    assert resolve_model("owner/name").path == place / "model"


def test_what_the_hub_cannot_say_is_said(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)
    with pytest.raises(
        RankfoldError, match=r"'owner/name' is not complete in the hub's cache, .*asked \(offline\); check"
    ):
        resolve_model("owner/name")


@pytest.mark.parametrize("thing", THINGS)
def test_every_command_says_what_it_is(place, run, thing, subtests):
    for command in COMMANDS:
        with subtests.test(command=command):
            code, out, err = run(command.format(thing))
            line = err.strip().splitlines()[-1]
            assert code == 2 and not out, err
            assert re.search(THINGS[thing], line), err
            assert not (place / "out").exists()
