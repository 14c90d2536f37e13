"""The scenarios' names, for collecting tests where the scenarios themselves cannot be imported (they import the rig
as a script does)."""

SCENARIO_NAMES = (
    "hello", "exit_codes", "identity", "identity_of_root", "start_error", "order", "init_failure", "volumes",
    "hostile_sub_path", "restarts", "logs", "exec_plain", "exec_tty", "stop", "signalled", "killed", "hub_away",
    "late_hub", "claimed", "shared_pids", "container_tty", "read_only_root", "fallback_message", "wrong_hub",
)  # fmt: skip
