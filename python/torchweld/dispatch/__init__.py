"""The one path of a call: choice of a backend, autograd, shards of DTensors."""
