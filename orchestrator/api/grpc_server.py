"""The gRPC server of the job service: jobs and fleets on one port."""

from __future__ import annotations

import grpc.aio

from nightshift.wire.v1 import fleets_pb2_grpc, jobs_pb2_grpc
from orchestrator.api.grpc_fleets import FleetServicer
from orchestrator.api.grpc_jobs import JobServicer
from orchestrator.api.rate import RateLimit
from orchestrator.api.service import Service


def make_server(service: Service, rate: RateLimit) -> grpc.aio.Server:
    """A server that answers for the service; give it a port, and start it."""
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 5 << 20)],
        maximum_concurrent_rpcs=service.config.max_requests,
    )
    jobs_pb2_grpc.add_JobServiceServicer_to_server(JobServicer(service, rate), server)
    fleets_pb2_grpc.add_FleetServiceServicer_to_server(FleetServicer(service, rate), server)
    return server
