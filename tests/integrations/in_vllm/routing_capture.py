"""The routed experts of a request, as vLLM's own capturer has them, in an engine on a CPU."""

import numpy


def generate(llm, prompt, new):
    """(the output of one request, its ``routed_experts``)."""
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capture

    served = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    capturer = capture.RoutedExpertsCapturer(256, llm.llm_engine.vllm_config)
    capture.bind_routed_experts_capturer(served, capturer)
    rows = []

    def after_a_step(module, args, kwargs, output):
        rows.append(capturer.snapshot_routing_data(len(kwargs["positions"])).numpy())

    hook = served.register_forward_hook(after_a_step, with_kwargs=True)
    try:
        sampling = SamplingParams(max_tokens=new, temperature=1.0, seed=1, ignore_eos=True, logprobs=0)
        [output] = llm.generate([prompt], sampling, use_tqdm=False)
    finally:
        hook.remove()
    return output, numpy.concatenate(rows)
