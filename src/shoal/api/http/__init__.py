"""The HTTP server below the routes: how bytes become a request and a reply, each with a bound.

server        listens on loopback, or elsewhere with TLS or behind a declared proxy
connections   how many connections one address, user or account may hold
protocol      uvicorn's protocol with limits for heads, bodies, pauses and unread replies
guard         the outermost ASGI layer: host name, open paths, token, shape of the request
limits        wrong tokens, audit entries and open streams of one caller
bodies        a request body: read within a size and a time, decoded strictly
problems      errors as RFC 9457 documents
sse           server-sent events over a plain ASGI reply
standby       what a control plane answers while another one leads
"""
