"""dualpath: KV-Cache of agents, loaded over the storage NICs of prefill and decode nodes alike."""

__version__ = "0.1.0"
