"""Run by ``test_vllm.py`` in a process of its own: greedy tokens out of vLLM's engine, and the cache it keeps.

    python vllm_engine.py FOLDER OUT.json PROMPTS NEW [trust] [DEVICES]

vLLM puts its own classes in place of those of transformers, so nothing else can run in its process.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main(folder: str, out: str, prompts: list[list[int]], new: int, *, trust: bool, devices: int) -> None:
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 128, "max_num_seqs": 4, "tensor_parallel_size": devices}
    llm = LLM(folder, dtype="float32", enforce_eager=True, trust_remote_code=trust, **sizes)
    settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
    specs, *_ = llm.llm_engine.engine_core.engine_core.model_executor.get_kv_cache_specs()  # of the first device
    cache = [spec.page_size_bytes // spec.block_size for spec in specs.values()]
    found = {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "cache_bytes_per_token": cache}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    more = sys.argv[5:]
    devices = [int(arg) for arg in more if arg.isdigit()] or [1]
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), trust="trust" in more, devices=devices[0])
