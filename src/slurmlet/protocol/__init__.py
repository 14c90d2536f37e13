"""What hub, runner, agent, netd and gateway say to each other, and the log format that runner and hub share."""
