"""Services that speak the real wire contracts on loopback and do no real work: for tests of the orchestrator."""
