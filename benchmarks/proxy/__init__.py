"""What a proxy costs: CPU per request, latency, memory. Shoal's data plane beside common proxies."""
