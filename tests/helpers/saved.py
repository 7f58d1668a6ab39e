"""A tiny model on disk with a real tokenizer, as a user would have one."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import tokenizers
import torch
import transformers as t
from tokenizers import ByteLevelBPETokenizer

import rankfold
from families import some_ids
from rankfold._utils.files import write_text


@torch.no_grad()
def assert_reloads(folder: Path, model, twice: Path) -> None:
    """A folder holds this model, and what is loaded from it can be saved in ``twice`` and loaded again."""
    expected, again = model(some_ids()).logits, rankfold.load(folder, device="cpu")
    assert torch.equal(again(some_ids()).logits, expected)
    again.save_pretrained(twice)
    assert torch.equal(rankfold.load(twice, device="cpu")(some_ids()).logits, expected)


def save_tiny(folder: Path, blocks: int = 4, *, family: str = "llama", **options) -> Path:
    """A random Llama of a few blocks, or a model of another family with such fields, and its tokenizer in ``folder``.

    Biases, and norms of queries and keys, are random where a family has them.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": blocks, "vocab_size": 400}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = t.AutoConfig.for_model(family, **sizes | options)
    model = t.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
        elif family != "llama" and name.endswith((".bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([topics["integers"], topics["class"]], vocab_size=380, special_tokens=["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


def save_tokenizer_over_characters(folder: Path, *, splits: bool = False) -> Path:
    """Replace the tokenizer of :func:`save_tiny` by one in SentencePiece's form: characters, and bytes for others.

    It puts a space before a text, as Llama 2 does; or splits at spaces that it has replaced before, as Gemma does.
    """
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = [f"\u2581{word}" for word in (topics["integers"] + topics["class"]).split()]
    trained.train_from_iterator(words, tokenizers.trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    model = tokenizers.models.BPE(
        {name: number for number, name in enumerate(names)},
        [tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    found = tokenizers.Tokenizer(model)
    parts = tokenizers.normalizers
    found.normalizer = parts.Sequence([parts.Prepend("\u2581"), parts.Replace(" ", "\u2581")])
    if splits:
        found.normalizer = parts.Replace(" ", "\u2581")
        found.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    found.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    specials = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    t.PreTrainedTokenizerFast(tokenizer_object=found, **specials).save_pretrained(folder)
    return folder


def save_gguf(folder: Path, file: Path) -> Path:
    """What :func:`save_tiny` wrote, as GGUF: matrices with rows of whole blocks in 8 bits, all else in fp32."""
    model = t.LlamaForCausalLM.from_pretrained(folder)
    config, tokenizer = model.config, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary + [f"<{i}>" for i in range(len(vocabulary), config.vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values, name = tensor.numpy(), names.get_name(name, (".weight",))
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def save_text(path: Path, copies: int = 1) -> Path:
    """Some English in a file."""
    write_text(path, "\n".join(topics[key] for key in ("class", "integers", "operator-summary", "for")) * copies)
    return path
