"""Forms of decoding operations that only a CPU needs."""
