"""The network over ZeroMQ: TCP, Unix sockets on one machine, and CURVE with the job's secret."""
