"""A conversation: what the model is given, what is streamed, what a full context drops, and what Ctrl-C ends."""

import pytest
import torch
import transformers as t
from tokenizers.processors import TemplateProcessing

from rankfold.errors import DataError, NumericsError, OptionError, UnsupportedModelError
from rankfold.evaluation.chat import Conversation, open_conversation
from rankfold.evaluation.generation import continue_text
from saved import save_tiny
from tiny_encoders import tiny_encoder

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def tokenizer(folder):
    return t.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(folder):
    model = t.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def given(model):
    """The ids of every prompt that the model gets."""
    prompts, generate = [], model.generate

    def recording(**options):
        prompts.append(options["input_ids"][0])
        return generate(**options)

    model.generate = recording
    return prompts


def said(conversation: Conversation, message: str) -> str:
    conversation.ask(message)
    pieces: list[str] = []
    answer = conversation.answer(pieces.append)
    assert "".join(pieces).strip() == answer.strip() and len(pieces) > 1
    return answer


@pytest.mark.parametrize("template", ["", TEMPLATE], ids=["plain", "template"])
def test_each_turn_continues_all_turns_before_it(model, tokenizer, given, template):
    if template:
        tokenizer.chat_template = template
    talk = Conversation(model, tokenizer, max_new_tokens=4)
    answers = [said(talk, "hello"), said(talk, "and you")]
    prompts = ["hello", f"hello{answers[0]}\nand you"]
    if template:
        prompts = ["<user>hello\n<assistant>", f"<user>hello\n<assistant>{answers[0]}\n<user>and you\n<assistant>"]
        prompts = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    else:
        prompts = [tokenizer(prompt).input_ids for prompt in prompts]
        assert answers[0] == continue_text(model, tokenizer, "hello", max_new_tokens=4)
    assert [ids.tolist() for ids in given[:2]] == prompts
    assert [turn["content"] for turn in talk.turns] == ["hello", answers[0], "and you", answers[1]]


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message(model, tokenizer, given):
    tokenizer.chat_template = TEMPLATE
    talk = Conversation(model, tokenizer, system="s", max_new_tokens=3)
    positions, dropped, asked = model.config.max_position_embeddings, [], 0
    while sum(dropped) < 2:
        asked += 1
        dropped.append(talk.ask(f"q{asked}"))
        talk.answer(lambda text: None)
    assert asked > 3 and set(dropped) <= {0, 1}
    assert all(len(ids) + 3 <= positions for ids in given)
    assert tokenizer.decode(given[-1]).startswith("<system>s")
    assert [turn["content"] for turn in talk.turns[::2]] == [f"q{n}" for n in range(3, asked + 1)]


def test_a_message_longer_than_the_context_leaves_the_turns_as_they_were(model, tokenizer):
    talk = Conversation(model, tokenizer, max_new_tokens=3)
    answer = said(talk, "hello")
    with pytest.raises(
        DataError, match="more than the model's context of .*; write a shorter one, or choose a smaller"
    ):
        talk.ask("hello " * model.config.max_position_embeddings)
    assert [turn["content"] for turn in talk.turns] == ["hello", answer]


def test_an_interrupt_ends_the_answer_and_keeps_what_was_written(model, tokenizer):
    whole = continue_text(model, tokenizer, "hello", max_new_tokens=8)
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    talk = Conversation(model, tokenizer, max_new_tokens=8)
    answer = said(talk, "hello")
    hook.remove()
    assert len(calls) == 4 and answer and whole.startswith(answer) and answer != whole
    assert said(talk, "again") and len(talk.turns) == 4


def test_a_question_without_an_answer_is_not_kept(model, tokenizer):
    talk = Conversation(model, tokenizer, max_new_tokens=4)
    said(talk, "hello")
    turns = list(talk.turns)
    weight = model.model.norm.weight.data.clone()
    model.model.norm.weight.data.fill_(torch.nan)
    talk.ask("again")
    with pytest.raises(NumericsError):
        talk.answer(print)
    model.model.norm.weight.data.copy_(weight)
    assert talk.turns == turns and said(talk, "again") and len(talk.turns) == 4


def test_a_sampled_answer_depends_on_the_seed_and_the_turn_alone(model, tokenizer):
    def answers(seed: int) -> list[str]:
        talk = Conversation(model, tokenizer, max_new_tokens=6, temperature=2.0, seed=seed)
        return [said(talk, "hello"), said(talk, "hello")]

    torch.manual_seed(9)
    first = answers(0)
    assert first == answers(0) != answers(1)
    talk = Conversation(model, tokenizer, max_new_tokens=6, temperature=2.0)
    assert said(talk, "hello") == first[0]


def test_a_template_writes_its_own_start_token(model, tokenizer, given):
    start = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[start])
    talk = Conversation(model, tokenizer, max_new_tokens=2)
    said(talk, "hello")
    assert given[-1].tolist().count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    talk = Conversation(model, tokenizer, max_new_tokens=2)
    said(talk, "hello")
    assert given[-1].tolist().count(tokenizer.bos_token_id) == 1


def test_a_model_that_writes_nothing_is_named(tmp_path):
    tiny_encoder("bert").save_pretrained(tmp_path / "reads")
    with pytest.raises(UnsupportedModelError, match=str(tmp_path / "reads")):
        open_conversation(tmp_path / "reads", max_new_tokens=2, temperature=0.0)


@pytest.mark.parametrize("template", ["", TEMPLATE.replace("tool", "system")], ids=["none", "without"])
def test_a_system_message_is_refused_where_the_template_takes_none(model, tokenizer, template):
    if template:
        tokenizer.chat_template = template
    with pytest.raises(OptionError, match="^system(:| needs a chat template).*leave it out"):
        Conversation(model, tokenizer, system="Be kind.")


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1.0}])
def test_numbers_out_of_range_are_refused(model, tokenizer, options):
    with pytest.raises(OptionError, match="max-new-tokens must be >= 1 and temperature >= 0"):
        Conversation(model, tokenizer, **options)
