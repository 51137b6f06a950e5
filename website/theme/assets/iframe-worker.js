// Search in pages that were opened from a folder: browsers start no worker there, so its script runs in a frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      // What the script sends to its page arrives as an event of this object.
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((done) => (script.onload = done));
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
