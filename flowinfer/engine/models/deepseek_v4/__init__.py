"""DeepSeek-V4: window and compressed attention, hyper-connections, hash and biased routers (arXiv 2606.19348)."""
