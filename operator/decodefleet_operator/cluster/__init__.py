"""The Kubernetes backend: watches, writes, leader election and the operator's process."""
