"""Programs for the servers' own runtimes: what a user of nginx, Node.js, Java or asyncio would write."""

from __future__ import annotations

# Workers, keep-alive to clients and to upstreams, sendfile: as people run it.
_NGINX = """
worker_processes 2;
error_log /dev/stderr warn;
pid /tmp/nginx.pid;
events { worker_connections 512; use epoll; }
http {
  access_log off;
  sendfile on;
  client_body_temp_path /tmp/body; proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi; uwsgi_temp_path /tmp/uwsgi; scgi_temp_path /tmp/scgi;
  UPSTREAM
  server {
    listen 80 reuseport;
    location / { root /tmp/www; }
    location = /health { return 200 "ok"; }
    location = /who { return 200 "$hostname $remote_addr $server_addr"; }
    PROXY
  }
}
"""
NGINX = _NGINX.replace("UPSTREAM", "").replace("PROXY", "")
NGINX_PROXY = _NGINX.replace("UPSTREAM", "upstream pages { server pages:80; keepalive 8; }").replace(
    "PROXY",
    'location /through/ { proxy_pass http://pages/; proxy_http_version 1.1; proxy_set_header Connection ""; }',
)
PAGE_BYTES = 1 << 20
RUN_NGINX = (
    f"mkdir -p /tmp/www; head -c {PAGE_BYTES} /dev/urandom >/tmp/www/page; sha256sum </tmp/www/page >/tmp/www/sum;"
    " exec nginx -c /conf/nginx.conf -g 'daemon off;'"
)

NODE_SERVER = """
require('http').createServer((question, answer) => {
  const socket = question.socket;
  answer.end(JSON.stringify({peer: socket.remoteAddress, local: socket.localAddress, url: question.url}));
}).listen(80);
"""
# The sizes of what the addresses gave, asked for twenty times each over kept connections.
NODE_CLIENT = """
const http = require('http'), agent = new http.Agent({keepAlive: true, maxSockets: 4});
const get = url => new Promise((done, fail) => http.get(url, {agent}, answer => {
  let size = 0;
  answer.on('data', data => size += data.length);
  answer.on('end', () => done(size));
}).on('error', fail));
(async () => {
  const sizes = new Set();
  for (let turn = 0; turn < 20; turn++)
    for (const size of await Promise.all(process.argv.slice(1).map(get))) sizes.add(size);
  console.log(JSON.stringify([...sizes]));
  process.exit(0);
})();
"""
# How much twenty requests gave; then both ends of a connection with itself, by its own name.
JAVA_CLIENT = """
import java.net.*;
import java.net.http.*;
public class Get {
  public static void main(String[] words) throws Exception {
    var client = HttpClient.newHttpClient();
    var request = HttpRequest.newBuilder(URI.create(words[0])).build();
    int size = 0;
    for (int turn = 0; turn < 20; turn++)
      size += client.send(request, HttpResponse.BodyHandlers.ofByteArray()).body().length;
    try (var listening = new ServerSocket(0);
         var near = new Socket(InetAddress.getLocalHost(), listening.getLocalPort());
         var far = listening.accept()) {
      System.out.println(size + " " + near.getLocalAddress().getHostAddress() + " " + far.getInetAddress().getHostAddress());
    }
  }
}
"""
ASYNCIO_SERVER = """
import asyncio

async def one(reader, writer):
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()

async def main():
    async with await asyncio.start_server(one, None, 7000) as server:
        await server.serve_forever()

asyncio.run(main())
"""
ASYNCIO_CLIENT = """
import asyncio, sys

async def one(number):
    reader, writer = await asyncio.open_connection(sys.argv[1], 7000)
    for turn in range(20):
        writer.write(f"c{number} t{turn}\\n".encode())
        assert await reader.readline() == f"C{number} T{turn}\\n".encode()
    writer.close()
    await writer.wait_closed()

async def main():
    await asyncio.gather(*(one(number) for number in range(50)))
    print("all answered")

asyncio.run(main())
"""

# Two clients that make a connection for each request and one that keeps its own, until the file /tmp/stop is there.
LOAD = """
import http.client, json, os, sys, threading, time
counts, failed = {"new": 0, "kept": 0}, []

def ask(connection, kind, **headers):
    connection.request("GET", "/who", headers=headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    counts[kind] += 1
    return answer.will_close

def fresh():
    while not os.path.exists("/tmp/stop"):
        connection = http.client.HTTPConnection("rolling", 80, timeout=5)
        try:
            ask(connection, "new", Connection="close")
        except Exception as error:
            failed.append(f"new {time.time():.2f} {error!r}")
        connection.close()
        time.sleep(0.005)

def kept():
    connection = None
    while not os.path.exists("/tmp/stop"):
        connection = connection or http.client.HTTPConnection("rolling", 80, timeout=5)
        ended = True
        try:
            ended = ask(connection, "kept")
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            pass  # a server that ends closes a kept connection between two requests: any client asks again
        except Exception as error:
            failed.append(f"kept {time.time():.2f} {error!r}")
        if ended:
            connection.close()
            connection = None
        time.sleep(0.005)

threads = [threading.Thread(target=act) for act in (fresh, fresh, kept)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({"counts": counts, "failed": failed}))
"""
