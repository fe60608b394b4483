"""The only place that names OpenRLHF and Ray: activation, refusals, version gate, CPU stand-ins, vLLM's hooks."""
