"""Names of environment variables, and typed access to them."""

import math
import os
from typing import NoReturn

from jaxfleet.errors import StrategyError

ROLE = "TRAINING_ROLE"
ROLE_TOO = "PADDLE_TRAINING_ROLE"  # spelling in fluid's documents and collective jobs
ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST"
TRAINERS = "PADDLE_TRAINERS_NUM"
TRAINER_ID = "PADDLE_TRAINER_ID"
CURRENT = "PADDLE_CURRENT_ENDPOINT"
IP = "POD_IP"
PORT = "PADDLE_PORT"
JOB = "JAXFLEET_JOB"
LAUNCH_ID = "JAXFLEET_LAUNCH_ID"
SECRET_FILE = "JAXFLEET_SECRET_FILE"
INSECURE = "JAXFLEET_INSECURE"
SAVE_DIR = "JAXFLEET_SAVE_DIR"
CHECKPOINT_DIR = "JAXFLEET_CHECKPOINT_DIR"
SERVER_RETURN = "JAXFLEET_SERVERS_RETURN"
MEETING_DIR = "JAXFLEET_MEETING_DIR"
SERVER_ID = "PADDLE_PSERVER_ID"
TRAINER_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
GPUS = "FLAGS_selected_gpus"
XLA_FLAGS = "XLA_FLAGS"
RESTART = "JAXFLEET_RESTART"
PLATFORMS = "JAX_PLATFORMS"
OF_CLUSTERS = (
    *(ROLE, ROLE_TOO, ENDPOINTS, TRAINERS, TRAINER_ID, CURRENT, IP, PORT),
    *(JOB, SECRET_FILE, CHECKPOINT_DIR, SERVER_RETURN, TRAINER_ENDPOINTS, RESTART),
    *(SERVER_ID, MEETING_DIR, INSECURE, SAVE_DIR, LAUNCH_ID),
)


def get(name: str) -> str:
    """Returns a variable stripped of white space; empty if unset."""
    return os.environ.get(name, "").strip()


def read_number(name: str, *, least: int, hint: str = "every process of a job needs it") -> int:
    """Returns a variable as an integer."""
    text = get(name)
    number = whole(text)
    if number is None or number < least:
        what = f"is {text!r}, not a whole number from {least} on" if text else "is not set"
        refuse(name, what, hint)
    return number


def read_seconds(name: str) -> float:
    """Returns a variable as a number of seconds, 0 if unset."""
    text = get(name)
    try:
        seconds = float(text or 0.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        refuse(name, f"is {text!r}, not a time", "it is a number of seconds, such as 60")
    return seconds


def whole(text: str) -> int | None:
    """Returns the value of a string of digits, None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raises the error of an invalid or missing variable."""
    raise StrategyError(f"environment variable {name} {what}", hint=hint)
