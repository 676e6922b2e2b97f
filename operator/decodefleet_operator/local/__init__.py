"""Fleets on one machine: processes for pods, a file for the resource, and the same controller as on Kubernetes."""
