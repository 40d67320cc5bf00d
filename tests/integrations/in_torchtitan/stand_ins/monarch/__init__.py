"""Of Monarch, what torchtitan's trainer of RL is written with: here it is called in this process."""
