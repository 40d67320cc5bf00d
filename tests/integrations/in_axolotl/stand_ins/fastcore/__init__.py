"""With which axolotl loads shards of quantised models."""
