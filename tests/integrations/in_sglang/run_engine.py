"""Generates with SGLang's engine, and prints it as JSON: SGLang kills the process whose engine fails.

python run_engine.py MODEL REQUEST [PATCH [ENGINE [fork]]]   what `generate`, `patch_sglang`, `Engine` take
"""

import json
import multiprocessing
import sys

ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "sampling_backend": "rlkernel",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.05,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "random_seed": 0,
}


def main():
    import sglang
    import sglang_environment  # noqa: F401  (before SGLang)

    import rlkernel

    folder, request, patch, engine = sys.argv[1], *map(json.loads, [*sys.argv[2:], "{}", "{}"][:3])
    if sys.argv[-1] == "fork":  # SGLang spawns its processes, each of which imports it anew
        start = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)
    with rlkernel.patch_sglang(**patch):
        llm = sglang.Engine(model_path=folder, **(ENGINE | engine))
        print("said:" + json.dumps(llm.generate(**request)), flush=True)
        llm.shutdown()


if __name__ == "__main__":  # the scheduler's process imports this file, too
    main()
