"""The operator: observe, plan and apply for DecoderDeployments, on Kubernetes and on one machine."""
