"""The parts of `benchmarks/fleet_sim.py`: traffic, simulated replicas, routers of ours and of others."""
