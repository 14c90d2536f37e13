"""The way of one pod through the hub, from the watch event to the last delete. `pod_manager` and `pod_worker` come first."""
