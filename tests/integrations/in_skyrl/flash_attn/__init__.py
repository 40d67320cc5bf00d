"""flash-attn without its kernels: what SkyRL pads and packs with."""
