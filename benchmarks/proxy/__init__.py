"""What a proxy costs: CPU for each request, latency, memory. Shoal's data plane beside those people use."""
