"""Names the apps of the installed package; Flower ships this file, semifed itself must be installed on every node."""

from semifed.engines.flower import deployed_client, deployed_server

server = deployed_server()
client = deployed_client()
