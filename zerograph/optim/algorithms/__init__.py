"""One record for each algorithm: its states, its rule and its kernels."""
