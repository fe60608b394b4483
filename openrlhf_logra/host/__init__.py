"""The only place that touches names of OpenRLHF, Ray and vLLM: activation, version gate, CPU stand-ins."""
