"""The first sentences of every page of results: what was asked, what came out, who needs it."""

from . import answers

# Part of the list on the first page -> page -> its question, and who reads it for what; its function answers.
QUESTIONS = {
    "Quality": {
        "first_run": ("What does the first run of the README end with?", "Read it to know what to expect."),
        "perplexity": ("How much perplexity does each method cost?", "Read it to choose a method and a sparsity."),
        "seeds": (
            "How much depends on the draw of the calibration text?",
            "Read it before you trust a small difference.",
        ),
        "grid": ("Which of all methods loses least under one protocol?", "Read it to place a published method."),
        "zero_shot": ("How much accuracy is left without training?", "Read it if the model answers questions."),
        "samples": (
            "What do compressed models write after the same prompts?",
            "Every method writes worse than the dense model; read it to see how.",
        ),
        "probe_texts": ("Do held-out calibration samples show every loss?", "Read it to choose the calibration text."),
        "calibration": ("Which calibration text serves several kinds of text?", "Read it to mix yours."),
        "domains": ("How much is lost on other text than the calibration's?", "Read it if your text varies."),
        "recover": ("How much does a short training give back?", "Read it before `rankfold recover`."),
        "tradeoff": ("Which method loses least at one speed?", "Read it if speed is the aim."),
        "same_bytes": (
            "At one file size: compress, quantise, or both?",
            "Read it before you compress a model that you quantise.",
        ),
        "rounding": (
            "With few bits already: remove more, or round more?",
            "Read it where the smallest format is not small enough.",
        ),
        "lowrankarena": (
            "What is kept by the rules of a public comparison?",
            "Read it next to that comparison's table.",
        ),
        "keep_quality": (
            "Does `--keep-quality` keep what was asked for?",
            "Read it before you choose a quality in place of a sparsity.",
        ),
        "gates": ("Does every method keep what it must?", "Contributors: `make gates` measures it again."),
    },
    "Speed, memory and cost": {
        "speed": (
            "How much faster is a compressed model on a CPU?",
            "Read it for large batches; decoding has a page of its own.",
        ),
        "decode": ("How much faster is decoding, a token at a time?", "Read it if you chat or serve."),
        "module_speed": ("Which module makes a model faster when compressed?", "Read it to choose `--modules`."),
        "kv_cache": ("How much smaller is the key/value cache?", "Read it for long contexts."),
        "draft": (
            "Does a compressed model pay as the draft of its parent?",
            "Read it before you decode speculatively.",
        ),
        "complexity": ("Do operations and cache fall as the weights do?", "Read it to plan by FLOPs."),
        "compression_cost": ("How long does compressing take?", "Read it to estimate a run."),
        "plan_time": (
            "How long does each method take, and does the plan say so?",
            "Read it to choose a method by its time.",
        ),
        "processes": ("How much faster are two processes than one?", "Read it if you have several devices."),
        "memory": ("How much memory does a streamed run take?", "Read it if the model is larger than your memory."),
        "large_models": (
            "What would large models take?",
            "Read it before you rent a GPU; `rankfold plan --gpu` does yours.",
        ),
        "decomposition_cost": (
            "How long does one block of a 7B model take?",
            "Read it for the time next to the forwards.",
        ),
        "gpu": ("What runs on an accelerator, and how fast?", ""),
        "cholesky": ("Why is a matrix padded before its Cholesky factor is taken?", "For contributors."),
    },
    "Other models and programs": {
        "images_and_text": (
            "Does a model of images need images in its calibration set?",
            "Read it before you compress one.",
        ),
        "science_qa": (
            "What does a model that sees lose in its language model, and what in its vision tower?",
            "Read it to choose what to compress.",
        ),
        "encoders": ("Can encoders be compressed?", "Read it for classifiers and embeddings."),
        "experts": ("What is an expert with few tokens fitted to?", "Read it for mixtures of experts."),
        "fewer_experts": ("Should experts go, or become narrower?", "Read it for mixtures of experts."),
        "qk_norm": (
            "Does compressing normalised queries and keys pay?",
            "Read it for Qwen 3, Gemma 3 and OLMo 2, where it is off.",
        ),
        "engines": ("Is the model faster in other engines too?", "Read it to choose an export."),
        "integrations": ("Which programs run on compressed models?", "Read it before you combine them."),
        "targets": ("What does a target cost?", "Read it to choose `--target`."),
    },
    "What each choice does": {
        "ablations": ("What does each step of the default gain?", "Read it to leave one out."),
        "studies": ("What do single choices of the papers change?", "For readers of MoDeGPT."),
        "allocation": ("Which sparsity of each block loses least?", "For readers of MoDeGPT's Table 27."),
        "module_cost": ("What does each kind of module hold and lose?", "Read it to choose `--modules`."),
        "latent_table": ("Does LatentLLM's order of pre-conditioners hold?", "For readers of its Table 2."),
        "latentllm_options": ("Which options of LatentLLM pay?", "Read it before you set one."),
        "joint_up_down": ("Does LatentLLM's joint MLP pay for its time?", "Read it before `joint=ud`."),
        "junction_speed": ("Which junction of LatentLLM is fastest?", "Read it to choose `junction`."),
        "moment_precision": ("How many rows may be summed in fp32?", "For contributors."),
        "random_matrices": ("Do LatentLLM's figures of random matrices hold?", "For readers of its Figures 7 to 16."),
    },
    "How the code is tested": {
        "mutants": ("Which small changes of the code do the tests not notice?", "For contributors: `make mutants`."),
        "robustness": ("What do hostile commands and damaged files do?", "For contributors: `make attack`."),
    },
}


def summary(page: str, records: list[dict]) -> list[str]:
    """Return the lines that a page begins with."""
    question, use = next((pages[page] for pages in QUESTIONS.values() if page in pages), ("", ""))
    answer = getattr(answers, page, None)
    return [" ".join(filter(None, (question, answer and answer(records), use))), ""]
