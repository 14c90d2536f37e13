"""The agent of an allocation node: holds a host of an allocation and starts runners there."""
