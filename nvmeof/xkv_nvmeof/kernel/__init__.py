"""Namespaces reached through Linux's own NVMe: connected with nvme-cli, found in sysfs, read and written as block devices."""
