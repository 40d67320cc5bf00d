"""The compiled kernels. A pointer is an int, 0 for null.

The arguments are the structs of csrc/include/rlkernel/<op>.h. The functions of CUDA and HIP have those of
the CPU's arguments and exist where their parts were built; `rlkernel.native.kernels_for` picks by device.
"""

from collections.abc import Sequence

def built() -> dict[str, list[str]]:
    """Which parts were built, and for which instruction sets or architectures."""

def logprob_forward_cpu(
    logits: int,
    dtype: int,
    rows: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    vocab: int,
    vocab_start: int,
    target_ids: int,
    ignore_index: int,
    temperatures: int,
    temperature: float,
    bias: int,
    logit_scale: float,
    softcap: float,
    state_max: int,
    state_sum: int,
    state_weighted: int,
    state_target: int,
    first: bool,
    last: bool,
    logprobs: int,
    entropy: int,
    lse: int,
    row_max: int,
    log_sum: int,
    stream: int,
) -> None: ...

logprob_forward_cuda = logprob_forward_cpu
logprob_forward_hip = logprob_forward_cpu

def logprob_backward_cpu(
    logits: int,
    dtype: int,
    rows: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    vocab: int,
    vocab_start: int,
    target_ids: int,
    ignore_index: int,
    temperatures: int,
    temperature: float,
    bias: int,
    logit_scale: float,
    softcap: float,
    grad_logprobs: int,
    grad_entropy: int,
    grad_lse: int,
    entropy: int,
    row_max: int,
    log_sum: int,
    out: int,
    out_dtype: int,
    out_outer_stride: int,
    out_inner_stride: int,
    stream: int,
) -> None: ...

logprob_backward_cuda = logprob_backward_cpu
logprob_backward_hip = logprob_backward_cpu

def logprob_exp_cpu(
    logits: int,
    dtype: int,
    rows: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    vocab: int,
    vocab_start: int,
    target_ids: int,
    ignore_index: int,
    temperatures: int,
    temperature: float,
    bias: int,
    logit_scale: float,
    softcap: float,
    row_max: int,
    out: int,
    out_dtype: int,
    out_outer_stride: int,
    out_inner_stride: int,
    stream: int,
) -> None: ...

logprob_exp_cuda = logprob_exp_cpu
logprob_exp_hip = logprob_exp_cpu

def logprob_support_forward_cpu(
    rows: int,
    vocab: int,
    target_ids: int,
    ignore_index: int,
    temperatures: int,
    temperature: float,
    ids: int,
    offsets: int,
    logits: int,
    dtype: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    values: int,
    logprobs: int,
    entropy: int,
    lse: int,
    row_max: int,
    log_sum: int,
    stream: int,
) -> None: ...

logprob_support_forward_cuda = logprob_support_forward_cpu
logprob_support_forward_hip = logprob_support_forward_cpu

def logprob_support_backward_cpu(
    rows: int,
    vocab: int,
    target_ids: int,
    ignore_index: int,
    temperatures: int,
    temperature: float,
    ids: int,
    offsets: int,
    values: int,
    dtype: int,
    grad_logprobs: int,
    grad_entropy: int,
    grad_lse: int,
    logprobs: int,
    entropy: int,
    row_max: int,
    log_sum: int,
    out: int,
    out_dtype: int,
    scattered: bool,
    inner: int,
    out_outer_stride: int,
    out_inner_stride: int,
    stream: int,
) -> None: ...

logprob_support_backward_cuda = logprob_support_backward_cpu
logprob_support_backward_hip = logprob_support_backward_cpu

def value_loss_forward_cpu(
    values: int,
    returns: int,
    old_values: int,
    dtype: int,
    other_dtype: int,
    mask: int,
    values_stride: int,
    returns_stride: int,
    old_stride: int,
    mask_stride: int,
    rows: int,
    length: int,
    cu_seqlens: int,
    offset_bytes: int,
    cliprange: float,
    huber_delta: float,
    unit: int,
    items: int,
    item_count: float,
    factor: float,
    slope: int,
    partials: int,
    scale: int,
    loss: int,
    metrics: int,
    stream: int,
) -> None: ...

value_loss_forward_cuda = value_loss_forward_cpu
value_loss_forward_hip = value_loss_forward_cpu

def value_loss_backward_cpu(
    grad_loss: int,
    slope: int,
    scale: int,
    rows: int,
    length: int,
    cu_seqlens: int,
    offset_bytes: int,
    out: int,
    out_dtype: int,
    stream: int,
) -> None: ...

value_loss_backward_cuda = value_loss_backward_cpu
value_loss_backward_hip = value_loss_backward_cpu

def whiten_cpu(
    x: int,
    wide: bool,
    mask: int,
    weights: int,
    n: int,
    states: int,
    state_count: int,
    update: bool,
    identity: bool,
    shift_mean: bool,
    unbiased: bool,
    eps_in_std: bool,
    eps: float,
    clip: float,
    partials: int,
    out: int,
    state: int,
    stream: int,
) -> None: ...

whiten_cuda = whiten_cpu
whiten_hip = whiten_cpu

def kl_shaped_rewards_cpu(
    rewards: int,
    logprobs: int,
    ref_logprobs: int,
    per_sequence: bool,
    mask: int,
    rewards_stride: int,
    logprobs_stride: int,
    ref_stride: int,
    mask_stride: int,
    rows: int,
    length: int,
    cu_seqlens: int,
    offset_bytes: int,
    beta: float,
    estimator: int,
    out: int,
    stream: int,
) -> None: ...

kl_shaped_rewards_cuda = kl_shaped_rewards_cpu
kl_shaped_rewards_hip = kl_shaped_rewards_cpu

def group_advantages_cpu(
    rewards: int,
    mask: int,
    n: int,
    columns: int,
    reward_weights: int,
    baselines: int,
    lengths: int,
    ids: int,
    order: int,
    ends: int,
    offsets: int,
    groups: int,
    size: int,
    estimator: int,
    scale: int,
    unbiased: bool,
    reward_singletons: bool,
    eps: float,
    batch: int,
    out: int,
    wide: int,
    counts: int,
    stream: int,
) -> None: ...

group_advantages_cuda = group_advantages_cpu
group_advantages_hip = group_advantages_cpu

def policy_loss_cpu(
    logprobs: int,
    old_logprobs: int,
    advantages: int,
    mask: int,
    ref_logprobs: int,
    rollout_logprobs: int,
    entropy: int,
    staleness: int,
    selected: int,
    token_counts: int,
    cu_seqlens: int,
    rows: int,
    length: int,
    advantage_per_token: bool,
    staleness_per_token: bool,
    grad_logprobs: int,
    grad_entropy: int,
    partials: int,
    values: int,
    choices: Sequence[int],
    numbers: Sequence[float],
    stream: int,
) -> None: ...

policy_loss_cuda = policy_loss_cpu
policy_loss_hip = policy_loss_cpu

def policy_select_cpu(
    logprobs: int,
    old_logprobs: int,
    advantages: int,
    mask: int,
    cu_seqlens: int,
    rows: int,
    length: int,
    advantage_per_token: bool,
    by_hash: bool,
    share: float,
    cov_low: float,
    cov_high: float,
    low: float,
    high: float,
    seed: int,
    selected: int,
    partials: int,
    counts: int,
    stream: int,
) -> None: ...

policy_select_cuda = policy_select_cpu
policy_select_hip = policy_select_cpu

def gae_cpu(
    rewards: int,
    rewards_stride: int,
    values: int,
    values_stride: int,
    mask: int,
    mask_stride: int,
    offsets: int,
    rows: int,
    length: int,
    total: int,
    last_values: int,
    gamma: float,
    lam: float,
    lams: int,
    zero_holes: bool,
    advantages: int,
    returns: int,
    stream: int,
) -> None: ...

gae_cuda = gae_cpu
gae_hip = gae_cpu

def preference_sums_cpu(
    logprobs: int,
    ref_logprobs: int,
    ref_per_token: bool,
    mask: int,
    nll_mask: int,
    log_sum_sq_probs: int,
    cu_seqlens: int,
    rows: int,
    length: int,
    paired: bool,
    ld_alpha: float,
    stats: int,
    stream: int,
) -> None: ...

preference_sums_cuda = preference_sums_cpu
preference_sums_hip = preference_sums_cpu

def preference_loss_cpu(
    stats: int,
    rows: int,
    labels: int,
    kl: int,
    kl_per_row: bool,
    order: int,
    items: int,
    nll_items: int,
    running_delta: int,
    loss: int,
    metrics: int,
    slopes: int,
    rewards: int,
    logps: int,
    new_delta: int,
    choices: Sequence[int],
    numbers: Sequence[float],
    weights: Sequence[float],
    smoothing: Sequence[float],
    stream: int,
) -> None: ...

preference_loss_cuda = preference_loss_cpu
preference_loss_hip = preference_loss_cpu

def preference_backward_cpu(
    grad_loss: int,
    slopes: int,
    stats: int,
    mask: int,
    nll_mask: int,
    labels: int,
    cu_seqlens: int,
    rows: int,
    length: int,
    ld_alpha: float,
    grad: int,
    stream: int,
) -> None: ...

preference_backward_cuda = preference_backward_cpu
preference_backward_hip = preference_backward_cpu

def attention_merge_cpu(
    out: int,
    dtype: int,
    out_stride: int,
    out_head_stride: int,
    lse: int,
    lse_stride: int,
    part: int,
    part_stride: int,
    part_head_stride: int,
    part_lse: int,
    part_lse_stride: int,
    sinks: int,
    rows: int,
    heads: int,
    head_dim: int,
    stream: int,
) -> None: ...

attention_merge_cuda = attention_merge_cpu
attention_merge_hip = attention_merge_cpu

def segment_reduce_cpu(
    source_k: int,
    source_v: int,
    dtype: int,
    source_k_stride: int,
    source_v_stride: int,
    index: int,
    offsets: int,
    rows: int,
    width: int,
    out_k: int,
    out_v: int,
    out_dtype: int,
    out_k_stride: int,
    out_v_stride: int,
    stream: int,
) -> None: ...

segment_reduce_cuda = segment_reduce_cpu
segment_reduce_hip = segment_reduce_cpu

def gather_kv_cpu(
    k: int,
    v: int,
    bytes: int,
    k_stride: int,
    v_stride: int,
    k_head_stride: int,
    v_head_stride: int,
    index: int,
    rows: int,
    heads: int,
    head_dim: int,
    out_k: int,
    out_v: int,
    stream: int,
) -> None: ...

gather_kv_cuda = gather_kv_cpu
gather_kv_hip = gather_kv_cpu

def sampling_statistics_cpu(
    logits: int,
    dtype: int,
    rows: int,
    row_stride: int,
    vocab: int,
    vocab_start: int,
    whole_vocab: int,
    adjusted: int,
    adjusted_stride: int,
    bitmask: int,
    bitmask_stride: int,
    temperatures: int,
    temperature: float,
    top_ks: int,
    top_k: int,
    top_ps: int,
    top_p: float,
    min_ps: int,
    min_p: float,
    top_n_sigmas: int,
    top_n_sigma: float,
    thresholds: int,
    band: int,
    seeds: int,
    positions: int,
    forced_ids: int,
    skip: int,
    order: int,
    gumbel: bool,
    raw: bool,
    entropy: bool,
    sigma: bool,
    records: int,
    group_max: int,
    stream: int,
) -> None: ...

sampling_statistics_cuda = sampling_statistics_cpu
sampling_statistics_hip = sampling_statistics_cpu

def sampling_finish_cpu(
    logits: int,
    dtype: int,
    rows: int,
    row_stride: int,
    vocab: int,
    vocab_start: int,
    whole_vocab: int,
    adjusted: int,
    adjusted_stride: int,
    bitmask: int,
    bitmask_stride: int,
    temperatures: int,
    temperature: float,
    top_ks: int,
    top_k: int,
    top_ps: int,
    top_p: float,
    min_ps: int,
    min_p: float,
    top_n_sigmas: int,
    top_n_sigma: float,
    thresholds: int,
    band: int,
    seeds: int,
    positions: int,
    forced_ids: int,
    skip: int,
    order: int,
    gumbel: bool,
    raw: bool,
    entropy: bool,
    sigma: bool,
    records: int,
    group_max: int,
    token_ids: int,
    raw_logprobs: int,
    tempered_logprobs: int,
    processed_logprobs: int,
    kept_mass: int,
    kept_count: int,
    entropies: int,
    rank: int,
    support: int,
    support_size: int,
    valid: int,
    row_max: int,
    log_sum: int,
    scratch: int,
    scratch_size: int,
    stream: int,
) -> None: ...

sampling_finish_cuda = sampling_finish_cpu
sampling_finish_hip = sampling_finish_cpu
