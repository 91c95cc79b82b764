"""What every environment variable that jaxfleet reads means."""

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "JAXFLEET_CACHE_DIR": "folder of compiled functions of tables for later processes; empty: "
        "none; by default `jaxfleet` in the user's cache folder",
        "JAXFLEET_CHECKPOINT_DIR": "folder in which servers keep checkpoints of their own, from "
        "which a restarted server goes on",
        "JAXFLEET_DUMP_DIR": "folder in which every pipeline writes the programs between passes",
        "JAXFLEET_DUMP_MEASURE": "number of calls of each step or program to time at its first, "
        "for the reports of its dump; 0 by default",
        "JAXFLEET_DUMP_SOURCE": "`1` adds the user's source lines to those dumps",
        "JAXFLEET_DUMP_UNTIL_COMPILED": "`1` ends a script at its first step",
        "JAXFLEET_INSECURE": "`1` lets a server start without a secret",
        "JAXFLEET_JOB": "name of the job, which distinguishes jobs that share a network",
        "JAXFLEET_JOINS": "`1`: this process joins a job with servers that runs already",
        "JAXFLEET_LAUNCH_ID": "distinguishes launches of one job; `jaxfleet launch` sets it",
        "JAXFLEET_MEETING_DIR": "shared folder in which the processes of a job meet",
        "JAXFLEET_METRICS_HOST": "address of metrics of servers and ranks; 127.0.0.1 by default",
        "JAXFLEET_METRICS_PORT": "port of the metrics of server 0 or rank 0; the others' follow",
        "JAXFLEET_PROGRESS": "`0` turns the progress of long work off",
        "JAXFLEET_RESTART": "how often this process, alone or with its job, was started again; "
        "`jaxfleet launch` sets it",
        "JAXFLEET_SAVE_DIR": "folders, separated as in `PATH`, below which servers write and read "
        "the checkpoints that trainers name",
        "JAXFLEET_SAVE_EVERY": "interval of checkpoints that steps write by themselves, such as "
        "`300s` or `100steps`; `jaxfleet launch --save-every` sets it",
        "JAXFLEET_SAVE_KEEP": "how many of those checkpoints are kept; 3 by default",
        "JAXFLEET_SAVE_TO": "folder of those checkpoints",
        "JAXFLEET_SECRET_FILE": "file with the job's secret; any process with its content may take "
        "part",
        "JAXFLEET_SERVERS_RETURN": "seconds that trainers wait for a lost server; 0 by default",
        "JAXFLEET_TRACE_DIR": "folder for the spans of all processes, which `jaxfleet timeline` "
        "merges",
        "TRAINING_ROLE": "`TRAINER` or `PSERVER`: the role of this process in a job with servers",
        "PADDLE_TRAINING_ROLE": "another spelling of `TRAINING_ROLE`",
        "PADDLE_PSERVERS_IP_PORT_LIST": "endpoints of the servers, in their order",
        "PADDLE_PSERVER_ID": "number of this server, from 0",
        "PADDLE_TRAINERS_NUM": "number of trainers",
        "PADDLE_TRAINER_ID": "number of this trainer, or rank, from 0",
        "PADDLE_TRAINER_ENDPOINTS": "endpoints of the ranks of a collective job, in their order",
        "PADDLE_CURRENT_ENDPOINT": "endpoint of this process, as it stands in the list",
        "PADDLE_TRAINERS": "machines of a job, as PaddleCloud names them",
        "PADDLE_PORT": "with `POD_IP`, the endpoint of this server",
        "POD_IP": "address of this machine; with `PADDLE_PORT`, the endpoint of this server",
        "TRAINER_PORTS_NUM": "number of free ports from `PADDLE_PORT` on",
        "SYS_JOB_ID": "name of the job in role makers of PaddleCloud",
        "SLURM_PROCID": "rank of a process that `srun` started",
        "SLURM_STEP_NUM_TASKS": "number of processes that `srun` started",
        "OMPI_COMM_WORLD_RANK": "rank of a process that Open MPI's `mpirun` started",
        "OMPI_COMM_WORLD_SIZE": "number of processes that Open MPI's `mpirun` started",
        "PMI_RANK": "rank of a process that another `mpirun` started",
        "PMI_SIZE": "number of processes that another `mpirun` started",
        "FLAGS_selected_gpus": "GPUs of this rank, as numbers",
        "FLAGS_check_nan_inf": "`1` makes NaN or Inf in a run of a fluid program an error",
        "FLAGS_rpc_deadline": "milliseconds that fluid's programs wait; 180000 by default",
        "FLAGS_rpc_send_thread_num": "fluid's number of threads that send, and so of requests at "
        "a time; 12 by default",
        "CUDA_VISIBLE_DEVICES": "GPUs that this process may use",
        "CPU_NUM": "number of CPU devices of a `ParallelExecutor`",
        "JAX_COMPILATION_CACHE_DIR": "folder in which JAX keeps compiled code; by default "
        "`jaxfleet launch` gives servers one of the job, and trainers that may be started again",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "least seconds of a compilation that is kept "
        "there; 0 where a launch gives that folder",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "least size of what is kept there; -1, all, "
        "where a launch gives that folder",
        "JAX_PLATFORMS": "platforms of JAX, such as `cpu`",
        "XLA_FLAGS": "flags of XLA; `jaxfleet launch --devices-per-process` adds to them",
        "XDG_CACHE_HOME": "the user's cache folder; `.cache` at home by default",
        "XDG_RUNTIME_DIR": "the user's folder for running programs, in which secrets of jobs lie",
        "no_grpc_proxy": "hosts that gRPC reaches without a proxy; a launch adds the ranks'",
        "no_proxy": "the same, if `no_grpc_proxy` is not set",
        "PYTHONPATH": "where child processes find modules; a launch adds the script's folder",
    }
)
